"""Extension `kv-events-zmq`: publishes over ZMQ which blocks the prefix cache holds, for routers and monitors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.config import EngineConfig
    from llmkit.kv_cache.events import KVEvent
    from llmkit_events.zmq_publisher import ZmqPublisher

NAME = "kv-events-zmq"


class ZmqEventOptions(BaseModel):
    """Options of the extension `kv-events-zmq`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str = Field(
        default="tcp://*:5557",
        min_length=1,
        description="Where to publish. Bound if it holds a * or is ipc:// or inproc://, else connected to.",
    )
    replay_endpoint: str | None = Field(
        default=None, min_length=1, description="Where what was published can be asked for again; none by default."
    )
    topic: str = Field(default="", description="First frame of every message, for subscribers to filter by.")
    buffer_steps: int = Field(default=10_000, ge=0, description="Messages that can be asked for again.")
    hwm: int = Field(default=100_000, ge=0, description="Messages kept for a slow subscriber; 0: without bound.")
    max_queue_size: int = Field(
        default=100_000, ge=1, description="Events that may wait to be sent; beyond that they are dropped."
    )


class KVEventsOverZmq:
    """The front door: an instance for each registry, so that every engine has a publisher of its own."""

    info = PluginInfo(
        summary="publishes the events of the prefix cache over ZMQ",
        requires=("pyzmq>=26",),
        options=ZmqEventOptions,
    )

    def __init__(self) -> None:
        self.publisher: ZmqPublisher | None = None

    @hookimpl
    def llmkit_engine_started(self, config: EngineConfig) -> None:
        from llmkit_events.zmq_publisher import ZmqPublisher

        self.llmkit_engine_stopped()
        self.publisher = ZmqPublisher(ZmqEventOptions.model_validate(_given(config)))

    @hookimpl
    def llmkit_kv_event(self, event: KVEvent) -> None:
        if self.publisher is not None:
            self.publisher.publish(event)

    @hookimpl
    def llmkit_engine_stopped(self) -> None:
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()


def _given(config: EngineConfig) -> dict[str, Any]:
    of_kind = config.plugins.options.get("extension", {})
    given = next((options for name, options in of_kind.items() if name.rpartition(":")[2] == NAME), {})
    return {key.replace("-", "_"): value for key, value in given.items()}

"""Three queues: waiting, running, swapped; prompts before decoding, in steps of their own."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import Load, RequestView, SchedulerPolicy
from llmkit_schedulers.fcfs import FcfsPolicy


class ClassicOptions(BaseModel):
    """Options of the classic policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    watermark: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Share of the KV blocks that must be free for a new request to enter, so that it is not thrown "
        "out again at once.",
    )


info = PluginInfo(
    summary="waiting, running and swapped queues; prompts before decoding, in steps of their own; preempts by swap",
    options=ClassicOptions,
)


class ClassicPolicy(SchedulerPolicy):
    """The scheduler of the first engines with a paged cache (Kwon et al., Efficient Memory Management for Large
    Language Model Serving with PagedAttention, 2023): first come, first served; the youngest yields and is swapped out;
    nobody new enters while one that was swapped out, or thrown out, waits."""

    preemption = "swap"
    mixes_prefill_and_decode = False
    starvation_bound_s = 0.0

    def __init__(self, watermark: float = 0.0) -> None:
        self._watermark = watermark
        self._waiting = FcfsPolicy()
        self._swapped = FcfsPolicy()

    def add(self, request: RequestView) -> None:
        self._waiting.add(request)

    def requeue(self, request: RequestView) -> None:
        self._swapped.add(request)

    def peek(self) -> RequestView | None:
        return self._swapped.peek() or self._waiting.peek()

    def pop(self) -> RequestView:
        return (self._swapped if len(self._swapped) else self._waiting).pop()

    def remove(self, request: RequestView) -> None:
        self._swapped.remove(request)
        self._waiting.remove(request)

    def __len__(self) -> int:
        return len(self._swapped) + len(self._waiting)

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:
        return self._waiting.victim(running, needing)

    def admit(self, request: RequestView, load: Load) -> bool:  # noqa: ARG002
        return load.num_free_blocks >= self._watermark * load.num_blocks


@hookimpl
def llmkit_scheduler_policy(options: ClassicOptions | None) -> SchedulerPolicy:
    return ClassicPolicy(options.watermark if options else ClassicOptions().watermark)

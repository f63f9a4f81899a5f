"""KV blocks in host memory, and behind it as files in a folder or an object store, so that a prefix is computed
once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit_connectors.offload.options import OffloadOptions

if TYPE_CHECKING:
    from llmkit.hookspecs.connector import Connector

info = PluginInfo(
    summary="keeps KV blocks in host memory, then in files of a folder or S3, for later requests and engines",
    requires=("fsspec>=2024.6",),
    extra="llmkit[offload]",
    options=OffloadOptions,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    if environment.platform == "win32":
        return ["The offload connector needs a POSIX system."]
    return []


@hookimpl
def llmkit_connector(options: OffloadOptions | None) -> Connector:
    from llmkit_connectors.offload.connector import OffloadConnector

    return OffloadConnector(options or OffloadOptions())

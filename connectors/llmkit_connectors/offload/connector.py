"""Builds the two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.errors import ConfigError, PluginError, described
from llmkit.hookspecs.connector import Connector, SchedulerConnector, SchedulerContext, WorkerConnector, WorkerContext
from llmkit_connectors.offload.file_tier import FileTier
from llmkit_connectors.offload.media import open_medium

if TYPE_CHECKING:
    from llmkit_connectors.offload.options import OffloadOptions


class OffloadConnector(Connector):
    """Raises ConfigError or PluginError for a url that nothing here can open."""

    def __init__(self, options: OffloadOptions) -> None:
        self._options = options
        self._files()

    def scheduler_half(self, context: SchedulerContext) -> SchedulerConnector:
        from llmkit_connectors.offload.lookups import FileLookups
        from llmkit_connectors.offload.scheduler_half import OffloadScheduler

        files = self._files()
        lookups = None
        if files is not None:
            lookups = FileLookups(files, [group.spec.sliding_window is None for group in context.layout.groups])
        return OffloadScheduler(context, self._options, lookups)

    def worker_half(self, context: WorkerContext) -> WorkerConnector:
        from llmkit_connectors.offload.worker_half import OffloadWorker

        return OffloadWorker(context, self._options, self._files())

    def _files(self) -> FileTier | None:
        url = self._options.url
        if url is None:
            return None
        try:
            medium = open_medium(url, self._options.storage_options)
        except ImportError as error:
            raise PluginError(
                f"The offload connector cannot open {url}: {described(error)}.",
                hint="For S3: pip install 's3fs>=2024.6'; for others, the library that fsspec names.",
            ) from error
        except Exception as error:
            raise ConfigError(
                f"The offload connector cannot open plugins.connector.offload.url {url!r}: {described(error)}.",
                hint="Give a folder, or a URL that fsspec knows, such as s3://bucket/folder.",
            ) from error
        return FileTier(medium, self._options.file_bytes)

"""The options of the offload connector."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_GIB = 1 << 30


class OffloadOptions(BaseModel):
    """Options of the offload connector."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host_gib: float = Field(
        default=4.0,
        gt=0,
        allow_inf_nan=False,
        description="Most host memory for blocks, in GiB, per worker. Without a GPU it is taken as it is filled, "
        "with one at once.",
    )
    eviction: Literal["lru", "arc"] = Field(
        default="lru",
        description="Which block leaves the host memory when it is full: the least recently used one, or ARC's choice, "
        "which keeps what is used again and again while much else passes through.",
    )
    url: str | None = Field(
        default=None,
        min_length=1,
        description="Where blocks are also kept as files, which outlive the engine and may be shared: a folder, or a "
        "URL that fsspec knows, such as s3://bucket/folder; default: nowhere.",
    )
    file_gib: float | None = Field(
        default=16.0,
        gt=0,
        allow_inf_nan=False,
        description="Most GiB of all block files at the url; null for no limit.",
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments for fsspec's file system at the url, such as endpoint_url for S3."
    )
    num_threads: int = Field(default=8, ge=1, le=256, description="Threads that load blocks; half as many write files.")
    max_pending_blocks: int = Field(
        default=2048,
        ge=1,
        description="Most blocks on their way to host memory, and most on their way to files (which are half of those "
        "in host memory at the most); what is computed meanwhile waits.",
    )

    def num_slots(self, block_bytes: int) -> int:
        """Blocks of `block_bytes` that the host memory has room for, at least one."""
        return max(1, int(self.host_gib * _GIB) // max(1, block_bytes))

    @property
    def file_bytes(self) -> int | None:
        """The limit of the files in bytes."""
        return None if self.file_gib is None else int(self.file_gib * _GIB)

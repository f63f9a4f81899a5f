"""A sequence as a connector sees it, without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmkit.kv_cache.hashing import block_hashes


@dataclass(eq=False)
class TrialSequence:
    """A sequence as a connector sees it: `llmkit.hookspecs.connector.TransferView`."""

    tokens: list[int]
    sequence_number: int
    block_size: int
    tables: tuple[tuple[int, ...], ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    arrival_time: float = 0.0
    user: str | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 1
    index: int = 0
    extra_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        return f"request-{self.sequence_number}"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def token_ids(self, first: int = 0, last: int | None = None) -> list[int]:
        return self.tokens[first:last]

    def block_hashes(self, num_blocks: int | None = None) -> list[bytes]:
        return block_hashes(self.tokens, self.block_size)[:num_blocks]

    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return self.tables

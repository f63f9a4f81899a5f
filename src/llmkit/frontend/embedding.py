"""Embeddings: what is asked for, and what is made of the engine's vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmkit.errors import InvalidRequestError, RequestFailedError, shown
from llmkit.requests.message import Pooling
from llmkit.requests.output import EmbeddingOutput, RequestOutput

POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(frozen=True)
class EmbeddingParams:
    """pooling: what becomes of the hidden states of a prompt's tokens: the last one, or the mean of all.
    normalize: to length 1. dimensions: keep so many of the first numbers (before normalising); None: all.

    Raises InvalidRequestError.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise _refused("pooling", self.pooling, "last or mean")
        if not isinstance(self.normalize, bool):
            raise _refused("normalize", self.normalize, "true or false")
        wanted = self.dimensions
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
            raise _refused("dimensions", wanted, "an integer of at least 1, or null")

    def check(self, hidden_size: int | None) -> None:
        """Raises InvalidRequestError if the model has fewer dimensions."""
        if self.dimensions is not None and hidden_size is not None and self.dimensions > hidden_size:
            raise _refused("dimensions", self.dimensions, f"at most {hidden_size}, the model's hidden size")

    def output(self, answer: RequestOutput) -> EmbeddingOutput:
        """The embedding of a request that has ended. Raises RequestFailedError."""
        if answer.embedding is None:
            raise RequestFailedError(answer.error or "the request was aborted.")
        vector = np.array(answer.embedding[: self.dimensions], np.float64)
        length = float(np.linalg.norm(vector))
        if self.normalize and length > 0:
            vector /= length
        return EmbeddingOutput(
            answer.request_id, vector.tolist(), len(answer.prompt_token_ids), answer.num_cached_tokens
        )


def _refused(field: str, value: Any, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} must be {expected}, got {shown(value)}.", param=field)

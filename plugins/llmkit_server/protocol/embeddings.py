"""/v1/embeddings and /pooling."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import Field

from llmkit_server.protocol.base import EngineFields, PromptTokensDetails, integer, nullable
from llmkit_server.protocol.completions import PROMPT


class EmbeddingRequest(EngineFields):
    """input: text, texts, token ids, or lists of ids. pooling: "last" (the last token's hidden state; default) or
    "mean". normalize: to length 1; default: true."""

    input: Any = Field(json_schema_extra=PROMPT)
    encoding_format: Any = nullable(enum=["float", "base64"])
    dimensions: Any = integer(1, 2**31 - 1)
    pooling: Any = nullable(enum=["last", "mean"])
    normalize: bool | None = None
    add_special_tokens: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """task: "embed" is the only one."""

    task: Any = nullable(const="embed")


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(msgspec.Struct):
    """embedding: numbers, or with base64 their bytes as 32-bit floats, lowest byte first."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Pooled(msgspec.Struct):
    """data: as `Embedding.embedding`."""

    index: int
    data: list[float] | str
    object: Literal["pooling"] = "pooling"


class PoolingResponse(msgspec.Struct):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage

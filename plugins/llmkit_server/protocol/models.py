"""/v1/models, /version, /load."""

from __future__ import annotations

from typing import Literal

import msgspec

from llmkit_server.context import ServedModels


class ModelPermission(msgspec.Struct):
    """An older part of OpenAI's model card that some clients insist on."""

    id: str
    created: int
    object: Literal["model_permission"] = "model_permission"
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct):
    """root: the model as the engine was given it. parent: of an adapter, the model it belongs to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    """server_load: requests under way."""

    server_load: int


def model_card(models: ServedModels, name: str) -> ModelCard:
    permission = ModelPermission(f"modelperm-{name}", models.created)
    return ModelCard(name, "model", models.created, "llmkit", models.root, None, models.max_model_len, [permission])

"""Several connectors as one: the one that offers most loads, all of them store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.hookspecs.connector import Connector, ConnectorBuilder


class Member(BaseModel):
    """One of the connectors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        min_length=1, validation_alias=AliasChoices("name", "kv_connector"), description="Connector plugin."
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        validation_alias=AliasChoices("options", "kv_connector_extra_config"),
        description="Its options.",
    )


class MultiOptions(BaseModel):
    """Options of the connector `multi`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connectors: tuple[Member, ...] = Field(
        min_length=1,
        max_length=8,
        description="The connectors, each as {name, options}; of those that offer equally much, the first loads.",
    )


info = PluginInfo(
    summary="several connectors as one: the one that offers most loads, all of them store",
    options=MultiOptions,
    auto=False,
)


@hookimpl
def llmkit_connector(options: MultiOptions, build: ConnectorBuilder) -> Connector:
    from llmkit_connectors.multi.connector import MultiConnector

    return MultiConnector([(member.name, build(member.name, member.options)) for member in options.connectors])

"""Front door of `outlines`: regular expressions as automata over tokens, by outlines-core."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.structured import GrammarCompiler


class OutlinesOptions(BaseModel):
    """Options of outlines."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_depth: int = Field(
        default=3,
        ge=1,
        le=8,
        description="How deep JSON may nest where a schema sets no bound: values of any kind, and references of a "
        "schema into itself. Each level doubles the automaton and more.",
    )


info = PluginInfo(
    summary="JSON schemas, regular expressions and choices as automata, by outlines-core; slow to compile, quick masks",
    requires=("outlines_core>=0.2.11",),
    extra="outlines",
    options=OutlinesOptions,
    rank=-10,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return [] if environment.has_module("outlines_core") else ["outlines_core is not installed."]


@hookimpl
def llmkit_grammar_compiler(options: OutlinesOptions | None, vocabulary: TokenVocabulary) -> GrammarCompiler:
    from llmkit_structured.outlines_grammar import OutlinesCompiler

    return OutlinesCompiler(vocabulary, (options or OutlinesOptions()).max_depth)

"""Front door of `guidance`: JSON schemas, regular expressions and context-free grammars by llguidance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.structured import GrammarCompiler


class GuidanceOptions(BaseModel):
    """Options of guidance."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    undeclared_properties: Literal["allow", "forbid"] = Field(
        default="forbid",
        description="Whether an object may have properties that its schema does not name, where the schema names "
        "others and says nothing of further ones. forbid: as the other engines; allow: as JSON schema has it.",
    )
    max_lexer_states: int = Field(
        default=50_000,
        ge=1_000,
        description="States of the lexical automaton beyond which a request fails; 1 to 2 kB each.",
    )


info = PluginInfo(
    summary="JSON schemas, regular expressions, Lark and EBNF grammars by llguidance; compiles in milliseconds",
    requires=("llguidance>=1.7",),
    extra="guidance",
    options=GuidanceOptions,
    rank=-1,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return [] if environment.has_module("llguidance") else ["llguidance is not installed."]


@hookimpl
def llmkit_grammar_compiler(options: GuidanceOptions | None, vocabulary: TokenVocabulary) -> GrammarCompiler:
    from llmkit_structured.guidance_grammar import GuidanceCompiler

    return GuidanceCompiler(vocabulary, options or GuidanceOptions())

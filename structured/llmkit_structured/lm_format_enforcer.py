"""Front door of `lm-format-enforcer`: JSON whose properties may come in any order, character by character."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.structured import GrammarCompiler


class FormatEnforcerOptions(BaseModel):
    """Options of lm-format-enforcer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_array_length: int = Field(
        default=0,
        ge=0,
        description="Most items of an array whose schema sets no limit; 0: no limit.",
    )


info = PluginInfo(
    summary="JSON with properties in any order, regular expressions and choices, by lm-format-enforcer; slow masks",
    requires=("lm-format-enforcer>=0.11.2",),
    extra="lm-format-enforcer",
    options=FormatEnforcerOptions,
    rank=-20,
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return [] if environment.has_module("lmformatenforcer") else ["lm-format-enforcer is not installed."]


@hookimpl
def llmkit_grammar_compiler(options: FormatEnforcerOptions | None, vocabulary: TokenVocabulary) -> GrammarCompiler:
    from llmkit_structured.enforcer_grammar import EnforcerCompiler

    return EnforcerCompiler(vocabulary, (options or FormatEnforcerOptions()).max_array_length)

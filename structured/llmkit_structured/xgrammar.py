"""Front door of `xgrammar`: context-free grammars by XGrammar, the default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs import Environment, PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.structured import GrammarCompiler

info = PluginInfo(
    summary="JSON schemas, regular expressions, EBNF and Lark grammars, structural tags by XGrammar; quick masks",
    requires=("xgrammar>=0.2.9",),
    extra="xgrammar",
)


@hookimpl
def llmkit_problems(environment: Environment) -> list[str]:
    return [] if environment.has_module("xgrammar") else ["xgrammar is not installed."]


@hookimpl
def llmkit_grammar_compiler(vocabulary: TokenVocabulary) -> GrammarCompiler:
    from llmkit_structured.xgrammar_grammar import XGrammarCompiler

    return XGrammarCompiler(vocabulary)

"""Grammars of lm-format-enforcer: parsers that see one character after another, and masks found by walking through the
vocabulary. For JSON the library's parser and the syntax of JSON both have to allow a character."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit_structured.enforcer_alphabet import Alphabet, Automaton, automaton, automaton_of_texts, code_range, sets_of
from llmkit_structured.enforcer_schema import EnforcerWriter, Schema
from llmkit_structured.enforcer_tokens import Mask, Node, TokenTree, is_beginning
from llmkit_structured.json_syntax import JsonSyntax, SyntaxRules
from llmkit_structured.request_text import UnsupportedRequest, choices, invalid, regex_tree, schema_of
from llmkit_structured.schema_refusal import UnsupportedSchema

if TYPE_CHECKING:
    from lmformatenforcer.characterlevelparser import CharacterLevelParser

    from llmkit.frontend.token_vocabulary import TokenVocabulary

_UNBOUNDED = 1 << 30
_MAX_CACHED_MASKS = 1024
MAX_REGEX_SIZE = 5_000
"""Characters of a regular expression, repetitions written out."""


@dataclass(frozen=True)
class Plan:
    """What a parser is made of; travels from the compile process. Either an automaton, under the name "", or a schema
    with the automata of its patterns and the rules of the syntax beside it."""

    alphabet: Alphabet
    automata: dict[str, Automaton] = field(default_factory=dict)
    schema: Schema | None = None
    rules: SyntaxRules | None = None


class EnforcerCompiler(GrammarCompiler):
    """JSON, choices and regular expressions. max_array_length: see FormatEnforcerOptions."""

    def __init__(self, vocabulary: TokenVocabulary, max_array_length: int) -> None:
        self._vocabulary = vocabulary
        self._max_array_length = max_array_length
        self._made: TokenTree | None = None
        self._lock = Lock()

    def problems(self, request: GrammarRequest) -> list[str]:
        try:
            _prepared(request)
        except UnsupportedRequest as reason:
            return [str(reason)]
        return []

    def warm_up(self) -> None:
        import interegular  # noqa: F401 - imported once, before the children are made
        import lmformatenforcer  # noqa: F401

        self._tree()

    def compile(self, request: GrammarRequest) -> bytes:
        try:
            plan, trees = _prepared(request)
        except UnsupportedRequest as reason:
            raise invalid([str(reason)]) from None
        automata = {name: automaton(tree, plan.alphabet) for name, tree in trees.items()}
        if any(one.initial not in one.map for one in automata.values()):
            raise invalid(["No text meets the request."])
        return pickle.dumps(replace(plan, automata=plan.automata | automata))

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:  # noqa: ARG002 - all is in `compiled`
        plan: Plan = pickle.loads(compiled)
        return CompiledParser(plan, self._tree(), self._max_array_length, len(compiled))

    def _tree(self) -> TokenTree:
        with self._lock:
            if self._made is None:
                self._made = TokenTree(self._vocabulary)
            return self._made


def _prepared(request: GrammarRequest) -> tuple[Plan, dict[str, Any]]:
    """What can be said without the library: a plan, and the languages that still have to become automata."""
    if request.kind == "choice":
        found = choices(request)
        alphabet = Alphabet.of((), set("".join(found)))
        return Plan(alphabet, {"": automaton_of_texts(found, alphabet)}), {}
    if request.kind == "regex":
        tree = regex_tree(request.source)
        _check_size(tree)
        return Plan(Alphabet.of(sets_of([tree]))), {"": tree}
    if request.kind not in ("json_schema", "json_object"):
        raise UnsupportedRequest(f"{request.kind} is not supported, only JSON, regular expressions and choices are.")
    if request.whitespace_pattern is not None:
        raise UnsupportedRequest("whitespace_pattern is not supported.")
    writer = EnforcerWriter(schema_of(request))
    try:
        schema = writer.document()
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"The JSON schema cannot be expressed: {error}.") from None
    for tree in writer.patterns.values():
        _check_size(tree)
    rules = SyntaxRules(
        request.max_whitespace, request.disable_any_whitespace, writer.has_integers, not writer.has_longest
    )
    apart = {chr(code) for code in range(128)} | set("".join(writer.texts))
    return Plan(Alphabet.of(sets_of(writer.patterns.values()), apart), schema=schema, rules=rules), writer.patterns


def _check_size(tree: Any) -> None:
    from llmkit_structured.regex_tree import size

    if size(tree) > MAX_REGEX_SIZE:
        raise UnsupportedRequest("The regular expression is too large.")


class CompiledParser(CompiledGrammar):
    """A plan with the library's parser of it at the beginning of the text."""

    def __init__(self, plan: Plan, tree: TokenTree, max_array_length: int, size_bytes: int) -> None:
        self.size_bytes = (1 << 16) + 8 * size_bytes
        self.plan = plan
        self.tree = tree
        self.masks: dict[Any, Mask] = {}
        self._max_array_length = max_array_length

    def start(self) -> Grammar:
        rules = self.plan.rules
        return ParserState(self, State(self._parser(), None if rules is None else JsonSyntax(rules)))

    def _parser(self) -> CharacterLevelParser:
        from lmformatenforcer.characterlevelparser import CharacterLevelParserConfig
        from lmformatenforcer.external.jsonschemaobject import JsonSchemaObject
        from lmformatenforcer.jsonschemaparser import JsonSchemaParser

        plan = self.plan
        if plan.schema is None:
            return _regex_parser(plan.automata[""])
        symbols = "".join(map(chr, plan.alphabet.starts)).replace("\\", "")
        config = CharacterLevelParserConfig(
            alphabet=symbols,
            max_consecutive_whitespaces=_UNBOUNDED,  # blanks are counted by JsonSyntax
            force_json_field_order=False,
            max_json_array_length=self._max_array_length,
        )
        context = JsonSchemaParser._Context()
        context.model_class = JsonSchemaObject(**plan.schema)
        context.alphabet_without_quotes = symbols.replace('"', "")
        context.regex_parser_cache = {name: _regex_parser(one) for name, one in plan.automata.items()}
        return JsonSchemaParser(context, config)


def _regex_parser(machine: Automaton) -> CharacterLevelParser:
    from lmformatenforcer.regexparser import RegexParser

    context = RegexParser._Context()
    context.pattern = machine
    context.state_character_cache = {}
    context.anything_else_characters = ""
    return RegexParser(context)


@dataclass(frozen=True, eq=False)
class State:
    """parser: the library's. syntax: None if the text is not JSON. pending: bytes of a character that is not whole."""

    parser: CharacterLevelParser
    syntax: JsonSyntax | None
    pending: bytes = b""

    @property
    def is_accepting(self) -> bool:
        if self.pending or not self.parser.can_end():
            return False
        return self.syntax is None or self.syntax.is_complete


class ParserState(Grammar):
    """One sequence. States are immutable, and all of them are kept."""

    def __init__(self, compiled: CompiledParser, state: State) -> None:
        self._compiled = compiled
        self._tree = compiled.tree
        self._alphabet = compiled.plan.alphabet
        self._states = [state]

    def fill_bitmask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        row[: self._tree.num_words] = self._mask(self._states[-1])
        row[self._tree.num_words :] = 0

    def accept(self, token_id: int) -> bool:
        following = self._after(self._states[-1], token_id)
        if following is None:
            return False
        self._states.append(following)
        return True

    def is_accepting(self) -> bool:
        return self._states[-1].is_accepting

    def validate(self, token_ids: Sequence[int]) -> int:
        state: State | None = self._states[-1]
        for count, token_id in enumerate(token_ids):
            assert state is not None
            state = self._after(state, token_id)
            if state is None:
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        if not 0 <= num_tokens < len(self._states):
            raise ValueError(f"cannot undo {num_tokens} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - num_tokens :]

    def _after(self, state: State, token_id: int) -> State | None:
        """The state after a token; None if it may not follow."""
        token = self._tree.tokens[token_id]
        if not token or (token_id in self._tree.crossing and _free_string(state) is not None):
            return None
        for byte in token:
            following = self._step(state, byte, state.parser.get_allowed_characters())
            if following is None:
                return None
            state = following
        return state

    def _step(self, state: State, byte: int, characters: str) -> State | None:
        """The state after one byte. characters: what the library's parser allows."""
        data = state.pending + bytes([byte])
        if data[0] >= 0x80:
            if is_beginning(data):
                low, high = code_range(data)
                in_string = state.syntax is None or state.syntax.in_free_string
                possible = in_string and any(s in characters for s in self._alphabet.symbols(low, high))
                return State(state.parser, state.syntax, data) if possible else None
            try:
                character = data.decode()
            except UnicodeDecodeError:
                return None
        else:
            character = chr(byte)
        symbol = self._alphabet.symbol(character)
        if symbol not in characters:
            return None
        syntax = state.syntax
        if syntax is not None:
            syntax = syntax.step(symbol)
            if syntax is None:
                return None
        return State(state.parser.add_character(symbol), syntax)

    def _mask(self, state: State) -> Mask:
        key = state.parser.cache_key() if state.syntax is None else None
        if key is not None and (key, state.pending) in self._compiled.masks:
            return self._compiled.masks[key, state.pending]
        mask = self._tree.empty()
        found: list[int] = []
        bounds = _free_string(state)
        if bounds is None:
            self._walk(self._tree.root, state, found)
        else:
            mask |= self._tree.in_string(*bounds)
            characters = state.parser.get_allowed_characters()
            for byte in b'"\\':
                if byte in self._tree.root.children:
                    self._walk_byte(self._tree.root, byte, state, characters, found)
        self._tree.allow(mask, found)
        if key is not None and len(self._compiled.masks) < _MAX_CACHED_MASKS:
            self._compiled.masks[key, state.pending] = mask
        return mask

    def _walk(self, node: Node, state: State, found: list[int]) -> None:
        characters = state.parser.get_allowed_characters()
        for byte in node.children:
            self._walk_byte(node, byte, state, characters, found)

    def _walk_byte(self, node: Node, byte: int, state: State, characters: str, found: list[int]) -> None:
        following = self._step(state, byte, characters)
        if following is not None:
            child = node.children[byte]
            found.extend(child.tokens)
            if child.children:
                self._walk(child, following, found)


def _free_string(state: State) -> tuple[int, int | None, bool] | None:
    """In a JSON string that may go on with any plain character: how many it still needs at least and may have at most,
    and whether the next may be a blank; else None."""
    syntax = state.syntax
    if syntax is None or state.pending or not syntax.in_free_string:
        return None
    key = state.parser.shortcut_key()
    if not isinstance(key, tuple) or key[0] != "json_freetext":
        return None
    _, length, least, most = key
    blank_first = syntax.mode == "string" or syntax.rules.blank_first
    return max(0, least - length), None if most >= _UNBOUNDED else most - length, blank_first

"""A check that cannot fail is no check: engines with one thing wrong each, and the check of the suite for grammar
engines that must notice it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit.testing.conformance import structured_suite as suite
from llmkit.testing.grammar import small_vocabulary

VOCABULARY = small_vocabulary()
ALL = (
    suite.test_masks_allow_what_is_accepted,
    suite.test_tokens_are_undone,
    suite.test_drafts_are_counted_and_change_nothing,
    suite.test_sequences_do_not_disturb_one_another,
    suite.test_rows_are_written_in_place,
    lambda compiler, vocabulary: suite.test_choices_by_brute_force(compiler, vocabulary, ["a", "ab", "日本", "b"]),
)


class Choices(Grammar):
    """One of some texts, nothing else, told apart by their beginnings. Nothing is wrong with it."""

    def __init__(self, choices: list[bytes], vocabulary: TokenVocabulary) -> None:
        self.choices, self.vocabulary, self.texts = choices, vocabulary, [b""]

    def follows(self, token_id: int) -> bool:
        token = self.vocabulary.tokens[token_id]
        return bool(token) and any(choice.startswith(self.texts[-1] + token) for choice in self.choices)

    def fill_bitmask(self, row: Any) -> None:
        row[:] = 0
        for token_id in filter(self.follows, range(self.vocabulary.vocab_size)):
            row.view("uint32")[token_id // 32] |= 1 << token_id % 32

    def accept(self, token_id: int) -> bool:
        if not self.follows(token_id):
            return False
        self.texts.append(self.texts[-1] + self.vocabulary.tokens[token_id])
        return True

    def is_accepting(self) -> bool:
        return self.texts[-1] in self.choices

    def validate(self, token_ids: Sequence[int]) -> int:
        before = list(self.texts)
        count = next((i for i, token_id in enumerate(token_ids) if not self.accept(token_id)), len(token_ids))
        self.texts = before
        return count

    def rollback(self, num_tokens: int) -> None:
        del self.texts[len(self.texts) - num_tokens :]


class ForgetsSteps(Choices):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(min(num_tokens, 1))


class AdvancesWithDrafts(Choices):
    def validate(self, token_ids: Sequence[int]) -> int:
        return next((i for i, token_id in enumerate(token_ids) if not self.accept(token_id)), len(token_ids))


class KnowsSingleBytesOnly(Choices):
    def follows(self, token_id: int) -> bool:
        return super().follows(token_id) and len(self.vocabulary.tokens[token_id]) == 1


class MayEndAnywhere(Choices):
    def is_accepting(self) -> bool:
        return True


class AllowsTheEndToken(Choices):
    def fill_bitmask(self, row: Any) -> None:
        super().fill_bitmask(row)
        if self.is_accepting():
            for token_id in self.vocabulary.eos_token_ids:
                row.view("uint32")[token_id // 32] |= 1 << token_id % 32


class AddsToTheRow(Choices):
    def fill_bitmask(self, row: Any) -> None:
        before = row.copy()
        super().fill_bitmask(row)
        row |= before


class StepsOnWhatItRefuses(Choices):
    def accept(self, token_id: int) -> bool:
        accepted = super().accept(token_id)
        if not accepted:
            self.texts.append(self.texts[-1][:-1])
        return accepted


class Shares(Choices):
    """All sequences have one state."""

    shared: list[bytes]

    def __init__(self, choices: list[bytes], vocabulary: TokenVocabulary) -> None:
        super().__init__(choices, vocabulary)
        self.texts = self.shared


class TakesTheFirstThatMatches(Choices):
    """As of regular expressions whose alternatives are tried in order: `a|ab` is only ever "a"."""

    def follows(self, token_id: int) -> bool:
        return self.texts[-1] not in self.choices and super().follows(token_id)


class ChoiceCompiler(GrammarCompiler):
    def __init__(self, kind: type[Choices]) -> None:
        self._kind = kind

    def problems(self, request: GrammarRequest) -> list[str]:
        return [] if request.kind == "choice" else ["only choices are supported"]

    def compile(self, request: GrammarRequest) -> bytes:
        return request.source.encode()

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:  # noqa: ARG002
        kind, choices = self._kind, [choice.encode() for choice in json.loads(compiled)]
        if kind is Shares:
            Shares.shared = [b""]

        class Compiled(CompiledGrammar):
            def start(self) -> Grammar:
                return kind(choices, VOCABULARY)

        return Compiled()


def failed(kind: type[Choices]) -> list[int]:
    """Which of ALL fail."""
    found = []
    for i, check in enumerate(ALL):
        try:
            check(ChoiceCompiler(kind), VOCABULARY)
        except Exception:  # an engine may also break its check
            found.append(i)
    return found


def test_a_right_engine_passes() -> None:
    assert failed(Choices) == []


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (ForgetsSteps, 1),
        (AdvancesWithDrafts, 2),
        (KnowsSingleBytesOnly, 5),
        (MayEndAnywhere, 5),
        (AllowsTheEndToken, 0),
        (AddsToTheRow, 4),
        (StepsOnWhatItRefuses, 0),
        (Shares, 3),
        (TakesTheFirstThatMatches, 5),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_one_fails(kind: type[Choices], check: int) -> None:
    assert check in failed(kind)


class Sleepy(GrammarCompiler):
    """Thinks about every request for a while."""

    def problems(self, request: GrammarRequest) -> list[str]:  # noqa: ARG002
        time.sleep(0.11)
        return []

    def compile(self, request: GrammarRequest) -> bytes:
        raise NotImplementedError

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        raise NotImplementedError


def test_one_that_sleeps_at_the_door_fails() -> None:
    with pytest.raises(AssertionError, match="for two choices"):
        suite.test_an_ordinary_request_is_judged_at_once(Sleepy())

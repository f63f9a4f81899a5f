"""Reasoning between `<think>` and `</think>`, once, at the beginning of the answer."""

from __future__ import annotations

import re
from typing import Literal

from llmkit.answers.after_reasoning import after_block
from llmkit.answers.arriving_text import BLANKS, ArrivingText, Markers, Waiting
from llmkit.hookspecs.reasoning_parser import ReasoningDelta, ReasoningFormat, ReasoningParser
from llmkit.requests.structured_outputs import StructuredOutputs

START, END = "<think>", "</think>"
_BLANK = " \t\r\n"
_ANY = re.compile(r".+", re.DOTALL)
_END = Markers(END)

State = Literal["opened", "closed", "unknown"]


def state_after(prompt_tail: str) -> State:
    """What the prompt leaves the model in. A block that the user wrote about is followed by something else."""
    tail = prompt_tail.rstrip(_BLANK)
    return "opened" if tail.endswith(START) else "closed" if tail.endswith(END) else "unknown"


class ThinkTags(ReasoningFormat):
    """always: whether the model reasons also where neither prompt nor answer opens a block."""

    def __init__(self, *, always: bool) -> None:
        self._always = always

    def parser(self, prompt_tail: str) -> ReasoningParser:
        state = state_after(prompt_tail)
        return ThinkParser("opened" if state == "unknown" and self._always else state)

    def constraint(self, answer: StructuredOutputs, prompt_tail: str) -> StructuredOutputs:
        state = state_after(prompt_tail)
        if state == "closed":
            return answer
        if state == "opened":
            return after_block(answer, "", END)
        return after_block(answer, START, END, optional=not self._always)

    def written(self, reasoning: str, content: str) -> str:
        return f"{START}\n{reasoning}\n{END}\n\n{content}"


class ThinkParser(ReasoningParser):
    """Blanks beside the marks are layout. After the end, and in an answer that does not begin with a block, everything
    is content."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._text = ArrivingText()
        self._reasoning: list[str] = []
        self._blanks: list[str] = []
        self._content: list[str] = []
        self._reader = self._read()

    def feed(self, text: str) -> ReasoningDelta:
        self._text.run(self._reader, text)
        return self._taken()

    def finish(self) -> ReasoningDelta:
        self._text.run(self._reader, None)
        return self._taken()

    def _taken(self) -> ReasoningDelta:
        delta = ReasoningDelta("".join(self._reasoning), "".join(self._content))
        self._reasoning.clear()
        self._content.clear()
        return delta

    def _read(self) -> Waiting[None]:
        text = self._text
        if self._state != "closed":
            text.record()
            yield from text.take_all(BLANKS)
            started = yield from text.take(START)
            before = text.recorded()
            if started or self._state == "opened":
                yield from self._block()
            else:
                self._content.append(before)
        while (yield from text.peek()):
            yield from text.take_all(_ANY, self._content.append)

    def _block(self) -> Waiting[None]:
        text = self._text
        yield from text.take_all(BLANKS)
        if (yield from text.until(_END, self._reason)) is None:
            # It was cut off, or the model ended without an answer: no mark follows that blanks could belong to.
            self._reasoning += self._blanks
            return
        yield from text.take_all(BLANKS)

    def _reason(self, piece: str) -> None:
        visible = piece.rstrip(_BLANK)
        if visible:
            self._reasoning += [*self._blanks, visible]
            self._blanks.clear()
        if len(visible) < len(piece):
            self._blanks.append(piece[len(visible) :])

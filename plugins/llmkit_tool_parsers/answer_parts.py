"""Content and calls of one answer, as they are found; and the driver of a parser that is written as a generator."""

from __future__ import annotations

from abc import abstractmethod

from llmkit.answers.arriving_text import ArrivingText, Waiting
from llmkit.hookspecs.tool_parser import ToolCallDelta, ToolDelta, ToolParser

_BLANK = " \t\r\n"


class AnswerParts:
    """Collects what belongs into the next delta.

    Blanks are held back until it is known what follows: before the first content they go if there was a call, at the
    end too; all others are content.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.at_line_start = True
        self._content: list[str] = []
        self._blanks: list[str] = []
        self._has_content = False
        self._new: list[tuple[int, str | None, list[str]]] = []

    def text(self, text: str) -> None:
        """Text that belongs to no call."""
        line = text[text.rfind("\n") + 1 :]
        self.at_line_start = not line.strip(_BLANK) and (self.at_line_start or "\n" in text)
        if self.num_calls and not self._has_content:
            self._blanks.clear()
            text = text.lstrip(_BLANK)
        visible = text.rstrip(_BLANK)
        if visible:
            self._content += [*self._blanks, visible]
            self._blanks.clear()
            self._has_content = True
        if len(visible) < len(text):
            self._blanks.append(text[len(visible) :])

    def begin(self, name: str) -> None:
        """A call begins."""
        self._new.append((self.num_calls, name, []))
        self.num_calls += 1
        self.at_line_start = True

    def arguments(self, piece: str) -> None:
        """More of the arguments of the call that has begun last."""
        index = self.num_calls - 1
        if not self._new or self._new[-1][0] != index:
            self._new.append((index, None, []))
        self._new[-1][2].append(piece)

    def taken(self) -> ToolDelta:
        """What has come since this was called last."""
        calls = tuple(ToolCallDelta(index, name, "".join(pieces)) for index, name, pieces in self._new)
        delta = ToolDelta("".join(self._content), calls)
        self._content.clear()
        self._new.clear()
        return delta

    def end(self) -> None:
        """The answer is over."""
        if not self.num_calls:
            self._content += self._blanks
        self._blanks.clear()


class GeneratorParser(ToolParser):
    """A parser that is one generator, `read`, over the whole answer; it ends where the text ends."""

    def __init__(self) -> None:
        self.answer = ArrivingText()
        self.parts = AnswerParts()
        self._reader = self.read()

    @abstractmethod
    def read(self) -> Waiting[None]:
        """Divide `self.answer` into `self.parts`."""

    def feed(self, text: str) -> ToolDelta:
        self.answer.run(self._reader, text)
        return self.parts.taken()

    def finish(self) -> ToolDelta:
        self.answer.run(self._reader, None)
        self.parts.end()
        return self.parts.taken()

    def give_back(self) -> None:
        """What was recorded is no call."""
        self.parts.text(self.answer.recorded())

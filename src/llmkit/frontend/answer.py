"""One of a request's answers, growing token by token."""

from __future__ import annotations

from llmkit.frontend.detokenizer import build_detokenizer
from llmkit.frontend.logprob_text import with_decoded_tokens
from llmkit.frontend.stop_strings import StopMatch, StopStringMatcher
from llmkit.frontend.tokenizer import Tokenizer
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput, EngineRequest, FinishReason
from llmkit.requests.output import CompletionOutput


class Answer:
    """Tokens, text and log-probabilities of sequence `index` of a request, and which of them were shown already."""

    def __init__(self, index: int, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._wants_logprobs = params.logprobs is not None
        self._shows_stop_token = params.include_stop_str_in_output
        self._detokenizer = build_detokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._matcher = StopStringMatcher(
            params.stop_strings,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._shown_texts = 0
        self._shown_tokens = 0
        self._shown_end = False

    def apply(self, output: EngineOutput) -> int:
        """Take in a step's tokens; how many. Those after the one that completes a stop string are dropped, ids and
        log-probabilities too."""
        before = len(self._token_ids)
        last = len(output.new_token_ids) - 1
        for i, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            if self._wants_logprobs and output.logprobs is not None:
                self._add_logprob(output.logprobs[i])
            ends = i == last and output.finish_reason == "stop" and not output.last_token_is_text
            if ends and not self._shows_stop_token:
                break  # the token that ended the answer is counted, not shown
            text = self._detokenizer.append(token_id)
            if text and self._show(text):
                return len(self._token_ids) - before
        if output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_reason)
        return len(self._token_ids) - before

    def end(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """End, unless it has ended. Text that was held back because a stop string might begin there is shown."""
        if self.finish_reason is None:
            self._texts.append(self._matcher.flush())
            self.finish_reason = reason
            self._stop_reason = stop_reason

    def _show(self, text: str) -> bool:
        """Append `text` as far as it may be shown; True if a stop string ended the answer."""
        shown = self._matcher.feed(text, len(self._token_ids))
        if isinstance(shown, StopMatch):
            self._texts.append(shown.text)
            self.finish_reason = "stop"
            self._stop_reason = shown.stop
            return True
        self._texts.append(shown)
        return False

    def _add_logprob(self, entry: PositionLogprobs) -> None:
        self._logprobs.append(with_decoded_tokens(entry, self._tokenizer))
        self._cumulative_logprob += entry.logprobs[0]

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether there are tokens or an end that were not shown yet."""
        return len(self._token_ids) > self._shown_tokens or (self.finish_reason is not None and not self._shown_end)

    def news(self) -> CompletionOutput:
        """What was added since the last call."""
        output = self._output(self._shown_texts, self._shown_tokens)
        self._mark_shown()
        return output

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        self._mark_shown()
        return self._output(0, 0)

    def _mark_shown(self) -> None:
        self._shown_texts, self._shown_tokens = len(self._texts), len(self._token_ids)
        self._shown_end = self.finish_reason is not None

    def _output(self, first_text: int, first_token: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts[first_text:]),
            token_ids=self._token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            logprobs=self._logprobs[first_token:] if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

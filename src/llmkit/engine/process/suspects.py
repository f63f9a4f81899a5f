"""Which requests may be why the engine process crashes, and how the guilty one is found among them.

A crash makes suspects of all requests that were part of the steps under way. Most are innocent: the process was killed
from outside, or another request was to blame. Whoever comes further afterwards is cleared. A request that was part of a
second crash without that fails if it was computed alone. In company it need not be to blame, be it the only suspect:
after a slow restart it may not have had the time to come further. It is tried, and so are others like it, one after
the other, before anybody else is computed, so that a trial takes moments. Somebody is on trial at any time then, and
another kill from outside meets an innocent one: only who is met in its second trial, too, is found guilty.

Whoever kills without being part of a step, while others come further, is not seen so. Where crashes go on without an
explanation, everybody that the process had is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from llmkit.engine.process.journal import Entry, Journal

CLEARED_TOKENS = 4
"""A suspect is cleared by more tokens than this: more than steps can be ahead of what the parent has been told."""

FOUND_STRIKES = 4
"""Crashes after which the only request that was part of all of them is guilty: two in company, two in trials."""


class Suspects:
    """Keeps the strikes of the entries of `journal`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def crashed(self, request_ids: Iterable[str]) -> Entry | None:
        """The process has died while these requests were computed. Returns the one that is found guilty, if any."""
        computed = [entry for request_id in request_ids if (entry := self._journal.get(request_id)) is not None]
        for entry in computed:
            if not entry.strikes or _is_cleared(entry):
                entry.strikes, entry.others_at_strike = 0, self._told_others(entry)
            entry.strikes += 1
            entry.tokens_at_strike = entry.num_tokens
        most = max((entry.strikes for entry in computed), default=0)
        worst = [entry for entry in computed if entry.strikes == most]
        found = most >= FOUND_STRIKES or (most == 2 and len(computed) == 1)
        return worst[0] if len(worst) == 1 and found else None

    def admitted(self) -> list[Entry]:
        """The entries that may be computed now and have not been sent: while any are on trial, the first of these,
        unless one is being tried."""
        on_trial = [entry for entry in self._journal if entry.strikes > 1 and not _is_cleared(entry)]
        if not on_trial:
            return [entry for entry in self._journal if entry.sent is None]
        if any(entry.sent is not None for entry in on_trial):
            return []
        return [max(on_trial, key=lambda entry: entry.strikes)]

    def suspect_all_sent(self) -> None:
        """Try everybody that the process had, whether part of its steps or not."""
        for entry in self._journal:
            if entry.sent is not None:
                if not entry.strikes or _is_cleared(entry):
                    entry.others_at_strike = self._told_others(entry)
                entry.strikes, entry.tokens_at_strike = max(2, entry.strikes), entry.num_tokens

    def others_went_on(self, guilty: Entry) -> bool:
        """Whether the engine has computed anything for others since the first of the crashes that `guilty` was part of:
        then it is no broken engine."""
        return self._told_others(guilty) > guilty.others_at_strike

    def _told_others(self, entry: Entry) -> int:
        return self._journal.num_told - entry.num_tokens

    @property
    def any_on_trial(self) -> bool:
        """Whether somebody may be waiting for somebody else to be cleared."""
        return any(entry.strikes > 1 for entry in self._journal)


def _is_cleared(entry: Entry) -> bool:
    return entry.num_tokens - entry.tokens_at_strike > CLEARED_TOKENS

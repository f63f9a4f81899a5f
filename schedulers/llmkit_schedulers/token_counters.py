"""Users' accounts of the service they have received, and which of those that wait has received least."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from llmkit.hookspecs.scheduler import RequestView
from llmkit_schedulers.fcfs import FcfsPolicy

_KEPT_ACCOUNTS = 4096


@dataclass(slots=True, eq=False)
class Account:
    """counter: service received so far. share: what a unit of service adds to it, the inverse of the user's weight.
    waiting: the user's requests, in the order of arrival. entry: the valid one in the heap of those that wait."""

    counter: float
    share: float
    waiting: FcfsPolicy = field(default_factory=FcfsPolicy)
    entry: tuple[float, int, int] | None = None

    @property
    def first_number(self) -> int:
        """Number of the request that is next; one must wait."""
        first = self.waiting.peek()
        assert first is not None
        return first.sequence_number


class Accounts:
    """Counters only ever grow, which is what the heap of those that wait relies on: an entry may be out of date, and
    then too small, and is brought up to date when it comes up.

    Accounts of users without waiting requests are forgotten when there are many, if that changes nothing: a user
    who has received no more than the least among those that wait would be lifted to it anyway.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._shares = {user: 1.0 / weight for user, weight in weights.items()}
        self._accounts: dict[str, Account] = {}
        self._heap: list[tuple[float, int, int, Account]] = []
        self._next_entry = 0
        self._left_last: Account | None = None
        self._forget_at = _KEPT_ACCOUNTS
        self.num_waiting = 0

    def find(self, user: str) -> Account | None:
        return self._accounts.get(user)

    def get(self, user: str) -> Account:
        """The account of `user`, opened if there is none."""
        account = self._accounts.get(user)
        if account is None:
            if len(self._accounts) >= self._forget_at:
                self._forget()
            account = self._accounts[user] = Account(self._floor(), self._shares.get(user, 1.0))
        return account

    def add(self, user: str, request: RequestView) -> None:
        """A request of `user` waits. A user of whom none waited is lifted to the least of those that wait or, if there
        are none, of the one of whom a request has waited last."""
        account = self.get(user)
        before = len(account.waiting)
        if not before:
            account.counter = max(account.counter, self._floor())
        account.waiting.add(request)
        self.num_waiting += len(account.waiting) - before
        if account.entry is None or (account.counter, account.first_number) < account.entry[:2]:
            self._push(account)

    def remove(self, account: Account, request: RequestView) -> None:
        """A request waits no longer; nothing happens if it did not."""
        before = len(account.waiting)
        account.waiting.remove(request)
        after = len(account.waiting)
        self.num_waiting -= before - after
        if before and not after:
            self._left_last = account

    def least(self) -> Account | None:
        """The account with the least counter of those that have a waiting request, the one whose first request is
        oldest among equals; None if nobody waits."""
        heap = self._heap
        while heap:
            counter, number, entry, account = heap[0]
            if account.entry is None or account.entry[2] != entry:
                heapq.heappop(heap)
            elif not len(account.waiting):
                heapq.heappop(heap)
                account.entry = None
            elif (counter, number) != (account.counter, account.first_number):
                heapq.heappop(heap)
                self._push(account)
            else:
                return account
        return None

    def _push(self, account: Account) -> None:
        self._next_entry += 1
        account.entry = (account.counter, account.first_number, self._next_entry)
        heapq.heappush(self._heap, (*account.entry, account))

    def _floor(self) -> float:
        least = self.least()
        if least is None:
            least = self._left_last
        return 0.0 if least is None else least.counter

    def _forget(self) -> None:
        floor = self._floor()
        self._accounts = {
            user: account
            for user, account in self._accounts.items()
            if len(account.waiting) or account.counter > floor or account is self._left_last
        }
        self._forget_at = max(_KEPT_ACCOUNTS, 2 * len(self._accounts))

"""How many tokens a step may compute: as configured, or less for a while after the device had no memory."""

from __future__ import annotations

STEPS_UNTIL_MORE = 64
"""So many steps in a row must find memory before the budget is doubled again."""


class TokenBudget:
    """limit: tokens of a step, from 1 to `configured`."""

    def __init__(self, configured: int) -> None:
        self.configured = configured
        self.limit = configured
        self._steps_well = 0

    def shrink(self, num_tokens: int) -> bool:
        """A step of `num_tokens` tokens found no memory: take half as many. False if there are no smaller steps."""
        self._steps_well = 0
        if num_tokens <= 1:
            return False
        self.limit = max(1, min(self.limit, num_tokens // 2))
        return True

    def went_well(self) -> None:
        """A step found memory."""
        if self.limit < self.configured:
            self._steps_well += 1
            if self._steps_well >= STEPS_UNTIL_MORE:
                self._steps_well = 0
                self.limit = min(self.configured, 2 * self.limit)

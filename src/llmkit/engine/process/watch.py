"""Tells a hung engine process from one that is busy."""

from __future__ import annotations

from dataclasses import dataclass

from llmkit.engine.process.messages import Heartbeat


@dataclass
class Watch:
    """What was last heard of one process. Times in seconds of one monotonic clock.

    silence_limit_s: longest silence of a process with something to do; its heartbeats come from a thread of their own,
    so that no step, however long, silences them. step_limit_s: longest that it may be at one thing, if that
    is bounded.
    """

    silence_limit_s: float
    step_limit_s: float
    heard: float
    activity: str = ""
    busy_since: float | None = None
    progressed: float = 0.0

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """One has arrived."""
        self.heard = now
        since = now - beat.age_s if beat.bounded else now
        self.progressed = max(self.progressed, since)  # whatever was done before is done
        self.activity = beat.activity
        self.busy_since = since if beat.activity and beat.bounded else None

    def sign(self, now: float) -> None:
        """Any other message has arrived: something has been done."""
        self.heard = self.progressed = now
        self.busy_since = None

    def pending_since(self, now: float) -> None:
        """Work has come for a process that had none: silence counts from here."""
        self.heard = max(self.heard, now)
        self.progressed = max(self.progressed, now)

    def problem(self, now: float) -> str | None:
        """Why a process that has something to do must be taken for hung, in words; None if it need not."""
        silent = now - self.heard
        if silent > self.silence_limit_s:
            return f"has given no sign of life for {silent:.0f} s (process.heartbeat_timeout_s)"
        busy = 0.0 if self.busy_since is None else now - self.busy_since
        if busy > self.step_limit_s:
            return f"has been at one thing ({self.activity}) for {busy:.0f} s (process.hang_timeout_s)"
        return None

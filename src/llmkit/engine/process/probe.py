"""A request of the supervisor's own, which tells a broken engine from requests that kill."""

from __future__ import annotations

from collections.abc import Iterable

from llmkit.requests.message import EngineOutput, EngineRequest
from llmkit.requests.sampling_params import SamplingParams

REQUEST_ID = "llmkit-probe"


class Probe:
    """One token after one token of prompt: an engine that dies of this is broken, whatever it was asked before.

    due: a process that starts is to be probed, as a request was found guilty and nothing was computed for others since
    its first crash. running: it is being probed, and has nothing else to do.
    """

    def __init__(self) -> None:
        self.due = False
        self.running = False

    def sent(self) -> EngineRequest:
        """The request, which is on its way from now on."""
        self.running = True
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
        return EngineRequest(request_id=REQUEST_ID, prompt_token_ids=[0], max_tokens=1, sampling_params=params)

    def answered(self, outputs: Iterable[EngineOutput]) -> bool:
        """Whether one of `outputs` ends it. A refusal does, too: the engine has lived to say so."""
        if any(output.request_id == REQUEST_ID and output.finish_reason is not None for output in outputs):
            self.due = self.running = False
            return True
        return False

    def crashed(self) -> None:
        """The process is gone, and with it the answer. Whatever was due still is."""
        self.running = False

"""A fair share for every user, by the tokens that they are served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.hookspecs.scheduler import RequestView, SchedulerPolicy, ServiceBound
from llmkit_schedulers.token_counters import Accounts

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class FairOptions(BaseModel):
    """Options of the fair policy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weights: dict[str, Weight] = Field(
        default_factory=dict, description="Share of a user relative to others; users that are not named have 1."
    )
    input_token_weight: Weight = Field(default=1.0, description="What a prompt token costs its user.")
    output_token_weight: Weight = Field(default=2.0, description="What an output token costs its user.")
    default_user: Annotated[str, Field(min_length=1)] = Field(
        default="anonymous", description="The user whom requests without one belong to; all of them share one part."
    )


info = PluginInfo(
    summary="equal (or weighted) shares of the tokens served for every user; the one served most yields",
    options=FairOptions,
)


class FairPolicy(SchedulerPolicy):
    """The virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm 2.

    Every user has a counter of the service received: input tokens, charged when a request enters, and output tokens,
    charged as they are produced, weighted and divided by the user's weight. The user with the least goes first, with
    the oldest request. Who comes back after having had no request waiting is lifted to the least counter among those
    that wait, so that nobody saves up service. What that bounds: `service_bound`.

    Beside the paper: the victim of a preemption is a request of the user who has got most; its input has been charged
    already when it enters again, and its user is lifted like one who comes back. Several answers to a request (n > 1)
    share its input tokens.
    """

    def __init__(self, options: FairOptions | None = None) -> None:
        self._options = options or FairOptions()
        self._accounts = Accounts(self._options.weights)
        self._paid: set[RequestView] = set()

    def add(self, request: RequestView) -> None:
        self._accounts.add(self._user(request), request)

    def requeue(self, request: RequestView) -> None:
        self._paid.add(request)
        self._accounts.add(self._user(request), request)

    def peek(self) -> RequestView | None:
        account = self._accounts.least()
        return None if account is None else account.waiting.peek()

    def pop(self) -> RequestView:
        account = self._accounts.least()
        if account is None:
            raise IndexError("no request waits")
        request = account.waiting.peek()
        assert request is not None
        self._accounts.remove(account, request)
        if request.index == 0 and request not in self._paid:
            account.counter += request.num_prompt_tokens * self._options.input_token_weight * account.share
        self._paid.discard(request)
        return request

    def remove(self, request: RequestView) -> None:
        self._paid.discard(request)
        account = self._accounts.find(self._user(request))
        if account is not None:
            self._accounts.remove(account, request)

    def __len__(self) -> int:
        return self._accounts.num_waiting

    def victim(self, running: Sequence[RequestView], needing: RequestView) -> RequestView | None:  # noqa: ARG002
        def served(request: RequestView) -> tuple[float, int]:
            account = self._accounts.find(self._user(request))
            return 0.0 if account is None else account.counter, request.sequence_number

        return max(running, key=served)

    def service_bound(self, longest_prompt: int, batch_tokens: int) -> ServiceBound:
        """With w_p and w_q the weights of input and output, L the longest prompt and M the tokens of a full batch:

        1. Only pop() of the least counter among those that wait lets a request enter. From then to its next entry a
           user is charged for that prompt, p <= L, and for what the user's running requests still produce, M - p at
           most: no more than U = w_q M, or w_p L + w_q (M - L) if a token of a prompt is the dearer one.
        2. The least counter among those that wait never falls: counters grow, whoever begins to wait is lifted to it,
           and with nobody waiting to the counter of who waited last. So by 1. nobody is more than U above it.
        3. Two users who wait are at most U apart, and are not lifted while they do: from any moment to any other what
           they get differs by 2 U at most.
        4. Who arrives with counter c has at most U more than the least, and enters before anyone whose counter is
           above c does: another who waits has c + U at most by then, and gets 2 U at most. What runs for users
           that do not wait comes on top, at most w_q M for all of them together.

        The paper proves the like, with U = max(w_p L, w_q M) and w_p <= w_q. Weights of users divide their charges.
        """
        prompt, output = self._options.input_token_weight, self._options.output_token_weight
        dearer = max(0.0, prompt - output)
        unit = output * max(batch_tokens, longest_prompt) + dearer * longest_prompt
        weights = self._options.weights
        apart = 2 * unit / min([1.0, *weights.values()])
        return ServiceBound(prompt, output, apart, apart, weights)

    def served(
        self,
        requests: Sequence[RequestView],
        num_prompt_tokens: Sequence[int],  # noqa: ARG002 - charged when the request entered
        num_output_tokens: Sequence[int],
    ) -> None:
        weight, default = self._options.output_token_weight, self._options.default_user
        get = self._accounts.get
        for request, count in zip(requests, num_output_tokens, strict=True):
            account = get(request.user or default)
            account.counter += count * weight * account.share

    def _user(self, request: RequestView) -> str:
        return request.user or self._options.default_user


@hookimpl
def llmkit_scheduler_policy(options: FairOptions | None) -> SchedulerPolicy:
    return FairPolicy(options)

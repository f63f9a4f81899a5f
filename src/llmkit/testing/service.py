"""A book of what users are served by an engine under a policy, for bounds that the policy claims."""

from __future__ import annotations

from collections import defaultdict

from llmkit.hookspecs.scheduler import SchedulerPolicy, ServiceBound
from llmkit.scheduling.plan import StepPlan
from llmkit.testing.scheduling import SchedulingHarness

LONGEST_PROMPT, LONGEST_ANSWER, NUM_SEQS = 12, 10, 3


class ServiceRun:
    """An engine in which `NUM_SEQS` requests run at a time. served: by user, in the weighted tokens of `bound`, which
    is None if the policy claims none. num_blocks: of four tokens; all that run have room in 18."""

    def __init__(self, policy: SchedulerPolicy, num_blocks: int) -> None:
        self.bound: ServiceBound | None = policy.service_bound(
            LONGEST_PROMPT, NUM_SEQS * (LONGEST_PROMPT + LONGEST_ANSWER)
        )
        self.served: dict[str, float] = defaultdict(float)
        self._entered: set[str] = set()
        self._harness = SchedulingHarness(
            policy,
            num_blocks=num_blocks,
            max_num_seqs=NUM_SEQS,
            num_host_blocks=2 * num_blocks,
            enable_prefix_caching=False,
            before_step=self._charge_prompts,
        )

    def add(self, user: str, prompt_tokens: int, answer_tokens: int) -> str:
        """A request of `user`; its id."""
        request_id = f"{user}-{len(self._harness.requests)}"
        self._harness.add(request_id, [1] * prompt_tokens, answer_tokens, user=user)
        return request_id

    def step(self) -> None:
        for output in self._harness.step():
            if self.bound is not None:
                user = self._user(output.request_id)
                self._serve(user, self.bound.output_token * len(output.new_token_ids))

    def entered(self, request_id: str) -> bool:
        """Whether it has ever run."""
        return request_id in self._entered

    def waits(self, user: str) -> bool:
        """Whether some request of `user` waits, new or preempted."""
        running = {request.request.request_id for request in self._harness.scheduler.running.snapshot()}
        return any(
            request_id not in running and self._user(request_id) == user and answer.finish_reason is None
            for (request_id, _), answer in self._harness.answers.items()
        )

    def _charge_prompts(self, plan: StepPlan) -> None:
        for request in plan.requests:
            request_id = request.request.request_id
            if request_id not in self._entered and self.bound is not None:
                self._entered.add(request_id)
                prompt = len(self._harness.requests[request_id].prompt_token_ids)
                self._serve(self._user(request_id), self.bound.prompt_token * prompt)

    def _serve(self, user: str, cost: float) -> None:
        assert self.bound is not None
        self.served[user] += cost / self.bound.weights.get(user, 1.0)

    def _user(self, request_id: str) -> str:
        return self._harness.requests[request_id].user or ""

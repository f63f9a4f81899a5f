from dataclasses import dataclass

from llmkit_shortest_first.policy import ShortestFirst


@dataclass(frozen=True)
class Waiting:
    sequence_number: int
    num_prompt_tokens: int


def drain(policy):
    return [policy.pop().sequence_number for _ in range(len(policy))]


def test_short_prompts_first():
    policy = ShortestFirst(max_overtakes=10)
    for number, length in enumerate([30, 10, 20]):
        policy.add(Waiting(number, length))
    assert drain(policy) == [1, 2, 0]


def test_a_long_prompt_is_overtaken_only_so_often():
    policy = ShortestFirst(max_overtakes=1)
    for number, length in enumerate([30, 10, 20]):
        policy.add(Waiting(number, length))
    assert drain(policy) == [1, 0, 2]


def test_removed_requests_are_gone():
    policy = ShortestFirst(max_overtakes=10)
    first, second = Waiting(0, 5), Waiting(1, 6)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    assert policy.peek() is second
    assert len(policy) == 1

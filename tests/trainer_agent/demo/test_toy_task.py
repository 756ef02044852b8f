"""The toy task is fair, repeatable and worth learning."""

from statistics import fmean

import pytest

from weightbus.trainer_agent.demo import toy_task as task


def test_prompts_repeat_by_seed_and_change_by_round() -> None:
    """Two runs of one seed see the same prompts; two rounds do not."""
    assert task.prompts(1, 3) == task.prompts(1, 3)
    assert task.prompts(1, 3) != task.prompts(1, 4)
    assert task.prompts(1, 3) != task.prompts(2, 3)


def test_a_round_has_groups_of_equal_prompts() -> None:
    """Advantages compare responses to the same prompt."""
    drawn = task.prompts(1, 1)
    assert len(drawn) == task.RESPONSES
    for first in range(0, len(drawn), task.GROUP):
        assert len({tuple(prompt) for prompt in drawn[first : first + task.GROUP]}) == 1


@pytest.mark.parametrize(
    ("response", "expected"), [([], 0.0), ([0], 1.0), ([task.WANTED], 0.0), ([task.WANTED - 1, task.WANTED], 0.5)]
)
def test_reward_is_the_share_of_wanted_tokens(response: list[int], expected: float) -> None:
    """Ids below WANTED count, the first one above does not."""
    assert task.reward(response) == expected


def test_advantages_judge_a_response_against_its_own_group() -> None:
    """A good response of a good group is not better than a good one of a bad group."""
    result = task.advantages([0.1, 0.3, 0.7, 0.9], group=2)
    assert result == pytest.approx([-1.0, 1.0, -1.0, 1.0])
    assert fmean(result) == pytest.approx(0.0)


def test_a_group_without_differences_teaches_nothing() -> None:
    """All earned the same: no division by zero, no push."""
    assert task.advantages([0.5] * 4, group=4) == [0.0] * 4

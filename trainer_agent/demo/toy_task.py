"""The toy task: emit tokens of the wanted class. Pure arithmetic, the same on every rank and in every run.

The reward of a response is the share of its tokens with an id below `WANTED`; a policy that has learned nothing earns
`WANTED / VOCABULARY`. Responses to one prompt form a group, and each is judged against its group's mean, as in GRPO.
"""

import random
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Final

VOCABULARY: Final = 512
WANTED: Final = 128
"""Token ids below this one are wanted: a quarter of the vocabulary, so an untrained policy earns about 0.25."""

PROMPT_TOKENS: Final = 8
RESPONSE_TOKENS: Final = 16
PROMPTS: Final = 8
"""Groups in one round."""
GROUP: Final = 8
"""Responses to one prompt."""
RESPONSES: Final = PROMPTS * GROUP

LEARNING_RATE: Final = 1e-2
"""Takes the reward from 0.25 to 0.95 in about 16 rounds; half of it needs twice as many, twice of it half."""


def prompts(seed: int, round_number: int) -> list[list[int]]:
    """The prompts of one round, each `GROUP` times: random, new in every round, the same in every run of a seed."""
    source = random.Random(seed * 1_000_003 + round_number)  # noqa: S311 - a repeatable task, not a secret
    drawn = [[source.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return [prompt for prompt in drawn for _ in range(GROUP)]


def reward(response: Sequence[int]) -> float:
    """The share of wanted tokens; nothing for an empty response."""
    return sum(token < WANTED for token in response) / len(response) if response else 0.0


def advantages(rewards: Sequence[float], group: int = GROUP) -> list[float]:
    """Each reward against its group's mean, in units of the group's spread; zero where there is none."""
    result: list[float] = []
    for first in range(0, len(rewards), group):
        members = rewards[first : first + group]
        mean, spread = fmean(members), pstdev(members)
        result.extend((value - mean) / spread if spread else 0.0 for value in members)
    return result

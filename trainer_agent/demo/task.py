"""The toy task: emit tokens of the wanted class. Pure arithmetic, the same on every rank and in every run.

The reward of a response is the share of its tokens with an id below `WANTED`; a policy that has learned nothing earns
`WANTED / VOCABULARY`. Responses to one prompt form a group, and each is judged against its group's mean, as in GRPO.
"""

import random
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Final

import msgspec

VOCABULARY: Final = 512
WANTED: Final = 128
"""Token ids below this one are wanted: a quarter of the vocabulary, so an untrained policy earns about 0.25."""

PROMPT_TOKENS: Final = 8
RESPONSE_TOKENS: Final = 16
PROMPTS: Final = 8
"""Groups in one round."""
GROUP: Final = 8
"""Responses to one prompt."""


class Sample(msgspec.Struct, frozen=True):
    """One response, with what the engine said of the weights that wrote it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    engine: str = ""
    version: str = ""
    """The label of the weights at the end of the response."""
    mixed: bool = False
    """The response began under one label and ended under another."""


def prompts(seed: int, round_number: int) -> tuple[tuple[int, ...], ...]:
    """The prompts of one round: random tokens, different in every round, the same in every run of one seed."""
    source = random.Random(seed * 1_000_003 + round_number)  # noqa: S311 - a repeatable task, not a secret
    return tuple(tuple(source.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)) for _ in range(PROMPTS))


def reward(response: Sequence[int]) -> float:
    """The share of wanted tokens; nothing for an empty response."""
    return sum(token < WANTED for token in response) / len(response) if response else 0.0


def advantages(rewards: Sequence[float], group: int = GROUP) -> list[float]:
    """Each reward against its group's mean, in units of the group's spread; zero where all of a group earned the same."""
    result: list[float] = []
    for first in range(0, len(rewards), group):
        members = rewards[first : first + group]
        mean, spread = fmean(members), pstdev(members)
        result.extend((value - mean) / (spread + 1e-6) if spread else 0.0 for value in members)
    return result

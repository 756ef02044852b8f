"""What is made of a driver's answers, without one. With one: tests/gpu/test_mapped_memory.py."""

from __future__ import annotations

from typing import Any

import pytest

from weightbus.dataplane.memory.cuda_memory import Driver

MEMORY_TYPE, MAPPED = 2, 13
INVALID_VALUE, INVALID_CONTEXT = 1, 201
POINTER = 0x7F0000000000


class Library:
    """Answers as (code, value) by attribute."""

    def __init__(self, answers: dict[int, tuple[int, int]]) -> None:
        self._answers = answers

    def cuPointerGetAttribute(self, found: Any, attribute: Any, pointer: Any) -> int:  # noqa: N802  the driver's name
        assert pointer.value == POINTER
        code, value = self._answers[attribute.value]
        if not code:
            found._obj.value = value
        return code


@pytest.mark.parametrize(
    ("answers", "mapped"),
    [
        ({MAPPED: (0, 1)}, True),
        ({MAPPED: (0, 0)}, False),
        ({MAPPED: (INVALID_VALUE, 0), MEMORY_TYPE: (INVALID_VALUE, 0)}, False),
        ({MAPPED: (INVALID_VALUE, 0), MEMORY_TYPE: (0, 2)}, True),
        ({MAPPED: (INVALID_CONTEXT, 0), MEMORY_TYPE: (INVALID_CONTEXT, 0)}, True),
    ],
    ids=["memory", "none", "none, says a newer driver", "a driver that cannot tell", "asked from nowhere"],
)
def test_memory_that_was_taken_away_is_told_whatever_the_driver(
    answers: dict[int, tuple[int, int]], mapped: bool
) -> None:
    """Only what the driver says it does not know at all, or knows to be empty, is refused."""
    driver = Driver.__new__(Driver)
    driver._library = Library(answers)  # type: ignore[assignment]
    assert driver.mapped(POINTER) is mapped

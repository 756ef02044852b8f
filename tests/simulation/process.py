"""A process that can be killed, stopped for a while and started again, with a clock of its own that drifts.

Work of an earlier life never runs. While a process is frozen (SIGSTOP) its work piles up and is done when it goes on,
however much time has passed meanwhile. Threads of the real programs that wait for something are generators here: they
yield a number of seconds, a `Bell`, or both.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from .loop import Loop

if TYPE_CHECKING:
    from .invariants import Judge

Thread = Generator[Any, Any, Any]


class Killed(BaseException):
    """The process dies here and now. Nothing may catch it but its own death."""


class Hung(BaseException):
    """This thread hangs in a call that never returns; `seconds` later its process dies. Other threads go on."""

    def __init__(self, why: str, seconds: float) -> None:
        super().__init__(why)
        self.seconds = seconds


class Trap:
    """Death at the `count`-th time that the process passes a `point`, right before or after what is done there.

    With `power` it is that of its machine.
    """

    def __init__(self, point: str, count: int, where: str, *, power: bool = False) -> None:
        self.point, self.count, self.where, self.power = point, count, where, power


class Stage(Protocol):
    """What a process needs of its world."""

    loop: Loop
    judge: Judge

    def rng(self, stream: str) -> random.Random:
        """The random numbers of one concern."""
        ...


class Bell:
    """Wakes the thread that waits for it. Rung before a thread waits, it wakes the next one at once."""

    def __init__(self) -> None:
        self._rung = False
        self._waiting: Callable[[], None] | None = None

    def ring(self) -> None:
        """Something happened."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            self._rung = True
        else:
            waiting()

    def wait(self, wake: Callable[[], None]) -> None:
        """Call `wake` at the next ring."""
        if self._rung:
            self._rung = False
            wake()
        else:
            self._waiting = wake

    def forget(self) -> None:
        """No thread waits any more."""
        self._waiting = None


class Alarm:
    """Does its work at the earliest of the times that it was set to, once."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self._process, self._work, self._life = process, work, process.life
        self._at = float("inf")

    def set(self, local: float) -> None:
        """Go off when the machine's clock shows `local`, or before."""
        process = self._process
        when = process.loop.now + process.seconds_until(local) + 1e-6
        if when < self._at:
            self._at = when
            process.loop.at(when, partial(self._off, when))

    def _off(self, when: float) -> None:
        if when == self._at:
            self._at = float("inf")
            self._process._enter(self._work, self._life)  # its own timer


class Process:
    """One process of the deployment."""

    def __init__(self, stage: Stage, name: str, drift: float) -> None:
        self.stage, self.loop, self.name = stage, stage.loop, name
        self.alive = self.frozen = False
        self.life = 0
        self.lag = 0.0
        """Seconds that the running step has spent in blocking calls so far."""
        self.trap: Trap | None = None
        self.power_fails = False
        """What ends this life is its machine's end, too."""
        self.on_death: Callable[[], None] = lambda: None
        """A supervisor that starts it again."""
        self._rate = 1.0 + drift
        self._booted = 1000.0 * self._rate
        self._backlog: list[Callable[[], None]] = []

    def clock(self) -> float:
        """`time.monotonic()` of this machine."""
        return self._booted + (self.loop.now + self.lag) * self._rate

    def seconds_until(self, local: float) -> float:
        """How long the world has to wait until this machine's clock shows `local`."""
        left = local - self.clock()
        return left / self._rate if left > 0.0 else 0.0

    # -- life and death

    def start(self) -> None:
        """A new life."""
        if self.alive:
            return
        self.life += 1
        self.alive, self.frozen, self.lag = True, False, 0.0
        self._backlog.clear()
        self.loop.note(self.name, f"starts (life {self.life})")
        self._enter(self.born)

    def die(self, why: str) -> None:
        """SIGKILL."""
        if not self.alive:
            return
        self.alive = self.frozen = False
        self.trap = None
        self._backlog.clear()
        power, self.power_fails = self.power_fails, False
        self.loop.note(self.name, f"** dies: {why}{', and its machine loses power' if power else ''}")
        self.gone()
        if power:
            self.unpowered()
        self.on_death()

    def lose_power(self) -> None:
        """The machine that it runs on is switched off."""
        if self.alive:
            self.power_fails = True
            self.die("power cut")
        else:
            self.loop.note(self.name, "** its machine loses power")
            self.unpowered()

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.frozen:
            self.frozen = True
            self.loop.note(self.name, "** is stopped (SIGSTOP)")

    def thaw(self) -> None:
        """SIGCONT."""
        if self.alive and self.frozen:
            self.frozen = False
            self.loop.note(self.name, "** goes on (SIGCONT)")
            backlog, self._backlog = self._backlog, []
            for work in backlog:
                self.soon(work)

    def born(self) -> None:
        """What the process does first."""
        raise NotImplementedError

    def gone(self) -> None:
        """What others notice of its death at once."""

    def unpowered(self) -> None:
        """What was not synced may be lost."""

    # -- work

    def soon(self, work: Callable[[], None], seconds: float = 0.0) -> None:
        """Do `work` in this life, in so many seconds of this machine's clock."""
        self.loop.after(seconds / self._rate, partial(self._enter, work, self.life))

    def alarm(self, work: Callable[[], None]) -> Alarm:
        """A timer of this life."""
        return Alarm(self, work)

    def _enter(self, work: Callable[[], None], life: int | None = None) -> None:
        if not self.alive or (life is not None and life != self.life):
            return
        if self.frozen:
            self._backlog.append(work)
            return
        self.lag = 0.0
        try:
            work()
        except Killed as death:
            self.die(str(death))
        except Hung as hung:
            self.loop.note(self.name, f"** hangs: {hung}")
            self.loop.after(hung.seconds, partial(self._end_of, self.life, str(hung)))
        except Exception as error:  # noqa: BLE001 - whatever a machine raises is what the simulation looks for
            lines = traceback.format_exception(error)
            self.stage.judge.broken("nothing-raises", f"{self.name}: {''.join(lines[-6:])}")
        self.lag = 0.0

    def passes(self, point: str, where: str) -> None:
        """A place where death may wait."""
        trap = self.trap
        if trap is None or trap.point != point or trap.where != where:
            return
        trap.count -= 1
        if trap.count <= 0:
            self.trap, self.power_fails = None, trap.power
            raise Killed(f"{where} {point}")

    def doomed(self, point: str) -> bool:
        """Whether death waits in the middle of what is done at `point` now."""
        trap = self.trap
        return trap is not None and (trap.point, trap.where) == (point, "during") and trap.count <= 1

    def _end_of(self, life: int, why: str) -> None:
        if self.life == life:
            self.die(why)

    def thread(self, generator: Thread) -> None:
        """Run a generator as a thread of this life."""
        self._resume(generator, None)

    def _resume(self, generator: Thread, value: object) -> None:
        try:
            wanted = generator.send(value)
        except StopIteration:
            return
        seconds, bell = wanted if isinstance(wanted, tuple) else (wanted, None)
        if isinstance(seconds, Bell):
            seconds, bell = None, seconds
        if bell is None:
            self.soon(partial(self._resume, generator, None), seconds)
            return
        woken = False

        def wake() -> None:
            nonlocal woken
            if not woken:
                woken = True
                bell.forget()
                self._resume(generator, None)

        if seconds is not None:
            self.soon(wake, seconds)
        bell.wait(lambda: self.soon(wake))

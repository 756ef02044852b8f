"""Sends the replies of an engine: in order, each again until it is acknowledged, without waiting for one another.

A version that is verified during its transfer gives two replies at a time. If the second waited for the `Ack` of the
first, requests would wait for one more exchange with the coordinator.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from weightbus.control.bus import BusClient
from weightbus.control.log import get_log
from weightbus.control.protocol import (
    ClientClosed,
    CoordinatorUnreachable,
    EngineMessage,
    RequestRefused,
    ToAgent,
    WeightbusError,
)

_ANSWER_S: Final = 5.0
_AGAIN_S: Final = 0.1
_CLOSE_S: Final = 5.0

_log = get_log(__name__)


class ReplySender:
    """One thread that sends. `say` and `forget` are called from one other."""

    def __init__(self, line: Callable[[], BusClient | None], agent: str) -> None:
        """`line` returns the present connection, if there is one."""
        self._line = line
        self._log = _log.bind(agent=agent)
        self._answers: queue.SimpleQueue[tuple[int, EngineMessage] | None] = queue.SimpleQueue()
        self._boot = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reply-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def say(self, message: EngineMessage) -> None:
        """Queue `message` behind earlier ones."""
        self._answers.put((self._boot, message))

    def forget(self) -> None:
        """Drop all messages queued until now."""
        self._boot += 1

    def stop(self) -> None:
        """Stop sending. To be called when the line is closed."""
        self._stopping.set()
        self._answers.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (first := self._answers.get()) is not None:
            waiting = [first]
            while not self._answers.empty() and (more := self._answers.get()) is not None:
                if more not in waiting:  # a repeated command gets an equal reply
                    waiting.append(more)
            while waiting and not self._stopping.is_set():
                begun = [(item, self._begin(item[1])) for item in waiting if item[0] == self._boot]
                waiting = [item for item, wait in begun if not self._said(item[1], wait)]
                if waiting:
                    self._stopping.wait(_AGAIN_S)
            if self._stopping.is_set():
                return

    def _begin(self, message: EngineMessage) -> Callable[[], ToAgent]:
        """Send `message`; the function that is returned waits for the acknowledgement, or raises."""
        bus = self._line()
        if bus is None:
            return partial(_raise, ClientClosed("there is no line to the coordinator"))
        try:
            return bus.ask(message, deadline_s=_ANSWER_S)
        except WeightbusError as error:
            return partial(_raise, error)

    def _said(self, message: EngineMessage, wait: Callable[[], ToAgent]) -> bool:
        """Whether `message` is settled: acknowledged, or refused for good."""
        try:
            wait()
        except (CoordinatorUnreachable, ClientClosed):
            return False
        except RequestRefused as refused:
            self._log.info("answer_refused", answer=message.kind, reason=str(refused))
        except WeightbusError as error:
            self._log.error("answer_not_sent", answer=message.kind, reason=str(error))
        return True


def _raise(error: WeightbusError) -> NoReturn:
    raise error

"""NIXL within one process: agents read each other's registered memory, and it is known what is registered."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

Places = list[tuple[int, int, int]]
"""Address, bytes and device of each."""


@dataclass(eq=False)
class FakeNixl:
    """All agents of a test, by name. Stands for `nixl._api.nixl_agent`."""

    agents: dict[str, Agent] = field(default_factory=dict)
    ever: int = 0
    """How often memory was registered."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Agents are used by a thread each."""

    def agent(self, name: str) -> Agent:
        return self.agents.setdefault(name, Agent(name, self))

    @property
    def registered(self) -> dict[str, int]:
        """By agent, how many registrations it still has."""
        return {name: len(agent.memory) for name, agent in self.agents.items() if agent.memory}


class Agent:
    """One of them."""

    def __init__(self, name: str, nixl: FakeNixl) -> None:
        self.name, self._nixl = name, nixl
        self.memory: dict[int, list[tuple[int, int, int, str]]] = {}
        self._notes: dict[str, list[bytes]] = defaultdict(list)

    def register_memory(self, table: list[tuple[int, int, int, str]], mem_type: str) -> int:
        assert mem_type
        with self._nixl.lock:
            self._nixl.ever += 1
            self.memory[self._nixl.ever] = table
            return self._nixl.ever

    def deregister_memory(self, handle: int) -> None:
        del self.memory[handle]

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def send_notif(self, name: str, note: bytes) -> None:
        with self._nixl.lock:
            self._nixl.agents[name]._notes[self.name].append(note)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self._nixl.lock:
            found, self._notes = dict(self._notes), defaultdict(list)
            return found

    def get_xfer_descs(self, places: Places, mem_type: str) -> Places:
        assert mem_type
        return places

    def initialize_xfer(self, way: str, local: Places, remote: Places, name: str, note: bytes) -> Any:
        assert way == "READ"
        for agent, places in ((self, local), (self._nixl.agents[name], remote)):
            for at, nbytes, _ in places:
                assert agent.holds(at, nbytes), f"{agent.name} was read where nothing is registered"
        return local, remote, name, note

    def transfer(self, handle: Any) -> str:
        local, remote, name, note = handle
        for (to, nbytes, _), (from_, _, _) in zip(local, remote, strict=True):
            ctypes.memmove(to, from_, nbytes)
        self.send_notif(name, note)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        del handle
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        del handle

    def holds(self, at: int, nbytes: int) -> bool:
        return any(
            begin <= at and at + nbytes <= begin + size for table in self.memory.values() for begin, size, _, _ in table
        )

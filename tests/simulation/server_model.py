"""An SGLang server as far as weights go: buckets, a label, a pause, a cache, and calls that are carried out in order.

Every bucket carries the tag of what it holds, ``version/table``. A token is made of all buckets, so the judge looks at
them whenever anything changes while the server generates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .world import World

LAUNCH = "default/launch"
FOREIGN = "foreign/x"
"""What another party loads."""


class CallFailed(Exception):
    """No answer, or no connection."""


class ServerModel:
    """One server. Launched anew it is another one, on the same address."""

    def __init__(self, world: World, name: str, buckets: int) -> None:
        self._world = world
        self.name = name
        self.launch = 0
        self.up = self.frozen = self.paused = False
        self.label = "default"
        self.buckets = [LAUNCH] * buckets
        self.left = LAUNCH
        """What the part holds that some versions leave."""
        self.left_unseen = False
        """Another party has changed that part, and no agent has noticed it yet."""
        self._tags: tuple[str, ...] | None = None
        self.epoch_loaded = 0
        self.cached: set[str] = set()
        self._queue: list[Callable[[], None]] = []
        self._dies_at: int | None = None
        self.foreign = False
        """Another party has changed it, and its agent had no time yet to do anything about it."""

    @property
    def tags(self) -> tuple[str, ...]:
        """What the buckets hold, each thing once."""
        if self._tags is None:
            self._tags = tuple(dict.fromkeys(self.buckets))
        return self._tags

    @property
    def generates(self) -> bool:
        """Requests are being answered."""
        return self.up and not self.paused and not self.frozen

    # -- life

    def start(self) -> None:
        """A launch: its own weights, its own label, not paused."""
        self.launch += 1
        self.up, self.frozen, self.paused, self.label = True, False, False, "default"
        self.buckets, self._tags = [LAUNCH] * len(self.buckets), None
        self.epoch_loaded, self.cached, self.foreign = 0, set(), False
        self.left, self.left_unseen = LAUNCH, False
        self._queue.clear()
        self._dies_at = None
        self._world.loop.note(self.name, f"server is up (launch {self.launch})")
        self._changed()

    def die(self) -> None:
        """The process is gone, whatever it was doing."""
        if self.up:
            self.up = self.frozen = False
            self._queue.clear()
            self._world.loop.note(self.name, "** server dies")
            self._changed()

    def die_half_loaded(self, bucket: int) -> None:
        """Die while bucket `bucket` is being loaded."""
        self._dies_at = bucket

    def spare(self) -> None:
        """It will not die while loading after all."""
        self._dies_at = None

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.up:
            self.frozen = True
            self._world.loop.note(self.name, "** server is stopped (SIGSTOP)")

    def thaw(self) -> None:
        """SIGCONT: calls that waited are carried out now, whether or not a caller still waits for them."""
        if self.up and self.frozen:
            self.frozen = False
            self._world.loop.note(self.name, "** server goes on")
            queue, self._queue = self._queue, []
            self._changed()
            for call in queue:
                call()

    # -- another party, by the same calls

    def load_foreign(self, *, label: str) -> None:
        """Replace all weights while it generates."""
        if self.generates:
            self._world.loop.note(self.name, "** another party loads weights of its own")
            self.foreign, self.label = True, label
            self.buckets, self._tags = [FOREIGN] * len(self.buckets), None
            self.left, self.left_unseen = FOREIGN, True
            self._changed()

    def resume_foreign(self) -> None:
        """Let it generate, whatever its weights are."""
        if self.up and self.paused and not self.frozen:
            self._world.loop.note(self.name, "** another party resumes the server")
            self.foreign = True
            self.resume()

    # -- calls

    def call(self, what: Callable[[], None], answer: Callable[[CallFailed | None], None], seconds: float) -> None:
        """Carry out `what` when it is this call's turn, after `seconds`, and answer then."""
        launch = self.launch

        def carry_out() -> None:
            if not self.up or self.launch != launch:
                answer(CallFailed("the connection broke"))
            elif self.frozen:
                self._queue.append(carry_out)
            else:
                try:
                    what()
                except CallFailed as failure:
                    answer(failure)
                    return
                answer(None)

        if not self.up:
            self._world.loop.after(0.002, lambda: answer(CallFailed("connection refused")))
            return
        self._world.loop.after(seconds, carry_out)

    def pause(self) -> None:
        """pause_generation."""
        self.paused = True
        self._world.loop.note(self.name, "server pauses")

    def resume(self) -> None:
        """continue_generation."""
        if self.paused:
            self._world.loop.note(self.name, f"server generates again: {self.tags}, labeled {self.label}")
        self.paused = False
        self._changed()

    def set_label(self, label: str) -> None:
        """update_weight_version."""
        self.label = label
        self._changed()

    def flush(self) -> None:
        """flush_cache."""
        self.cached.clear()
        self._changed()

    def load(self, bucket: int, tag: str, epoch: int) -> None:
        """update_weights: one bucket changes."""
        if self._dies_at is not None and bucket >= self._dies_at:
            self.die()
            raise CallFailed("the connection broke")
        self.buckets[bucket], self._tags = tag, None
        self._world.judge.loaded(self, epoch)
        self.epoch_loaded = max(self.epoch_loaded, epoch)
        self._world.loop.note(self.name, f"server loads bucket {bucket}: {tag} (epoch {epoch})")
        self._changed()

    def load_left(self, tag: str) -> None:
        """The part that other versions leave changes, with the version `tag`."""
        self.left, self.left_unseen = tag, False
        self._changed()

    def load_checkpoint(self) -> None:
        """update_weights_from_disk of the launch checkpoint: everything changes."""
        self.buckets, self._tags = [LAUNCH] * len(self.buckets), None
        self.left, self.left_unseen = LAUNCH, False
        self._world.loop.note(self.name, "server loads its launch checkpoint")
        self._changed()

    def _changed(self) -> None:
        self._world.judge.server_changed(self)
        if self.generates:
            self.cached.update(self.tags)

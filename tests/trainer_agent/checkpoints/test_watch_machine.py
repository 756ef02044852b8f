"""When the watcher looks into a folder, publishes it, skips it or gives it up: events and times in, effects out."""

import pytest

from weightbus.control.protocol.messages import MAX_VERSION
from weightbus.trainer_agent.checkpoints.watch_machine import (
    Folder,
    FolderChanged,
    FolderResult,
    Inspect,
    Inspected,
    Listed,
    PublishEnded,
    PublishFolder,
    RejectFolder,
    Skip,
    WatchLimits,
    WatchMachine,
)

LIMITS = WatchLimits(settle_s=5.0, stale_s=100.0, retry_s=10.0, longest_retry_s=40.0)


def listed(*steps: int, latest: int | None = None, **changed: str) -> Listed:
    """Folders ``step-N``; `changed` gives some another fingerprint."""
    return Listed(tuple(Folder(f"step-{n}", n, changed.get(f"s{n}", "a")) for n in steps), latest)


def published(machine: WatchMachine, version: int, now: float) -> None:
    name = f"step-{version}"
    assert machine.handle(Inspected(name, FolderResult.FINISHED), now) == (PublishFolder(name, version),)
    machine.handle(PublishEnded(name, FolderResult.PUBLISHED), now)


def test_a_folder_is_looked_into_when_it_has_settled() -> None:
    """Not while anything in it changes, whatever the file system says of its parts."""
    machine = WatchMachine(LIMITS)
    assert machine.handle(listed(10), 0.0) == ()
    assert machine.handle(listed(10, s10="b"), 4.0) == ()
    assert machine.handle(listed(10, s10="b"), 8.9) == ()
    assert machine.handle(listed(10, s10="b"), 9.0) == (Inspect("step-10"),)
    assert machine.handle(Inspected("step-10", FolderResult.FINISHED), 9.0) == (PublishFolder("step-10", 10),)
    assert machine.handle(PublishEnded("step-10", FolderResult.PUBLISHED), 10.0) == ()
    assert machine.done == 10


def test_a_number_that_is_no_version_is_rejected_once() -> None:
    """Messages carry versions up to 2**53: the folder would be tried for ever, and those below it never."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(7, MAX_VERSION + 1), 0.0)
    (rejected,) = machine.handle(listed(7, MAX_VERSION + 1), 5.0)
    assert isinstance(rejected, RejectFolder)
    assert str(MAX_VERSION) in rejected.reason
    assert machine.handle(listed(7, MAX_VERSION + 1), 6.0) == (Inspect("step-7"),)


def test_nothing_is_done_twice() -> None:
    """A published folder stays published when its trainer adds or removes files."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    machine.handle(listed(10), 5.0)
    published(machine, 10, 5.0)
    for now, mark in ((6.0, "a"), (20.0, "b"), (40.0, "b")):
        assert all(isinstance(effect, FolderChanged) for effect in machine.handle(listed(10, s10=mark), now))


def test_the_newest_finished_one_is_published_and_older_ones_are_skipped() -> None:
    """Once each, and with the reason."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10, 20, 30), 0.0)
    assert machine.handle(listed(10, 20, 30), 5.0) == (Inspect("step-30"),)
    assert machine.handle(Inspected("step-30", FolderResult.UNFINISHED, "a shard is missing"), 5.0) == ()
    assert machine.handle(listed(10, 20, 30), 5.5) == (Inspect("step-20"),)
    machine.handle(Inspected("step-20", FolderResult.FINISHED), 6.0)
    assert machine.handle(PublishEnded("step-20", FolderResult.PUBLISHED), 7.0) == (
        Skip("step-10", 10, "version 20 is published"),
    )
    assert machine.handle(listed(10, 20, 30), 8.0) == ()
    assert machine.handle(listed(10, 20, 30, s30="b"), 9.0) == ()
    assert machine.handle(listed(10, 20, 30, s30="b"), 14.0) == (Inspect("step-30"),)


def test_what_the_channel_has_already_is_skipped() -> None:
    """A restarted watcher learns from the coordinator how far the channel is."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10, 20), 0.0)
    machine.handle(listed(10, 20), 5.0)
    machine.handle(Inspected("step-20", FolderResult.FINISHED), 5.0)
    assert machine.handle(PublishEnded("step-20", FolderResult.OLDER, "version 25 is committed"), 5.0) == (
        Skip("step-20", 20, "version 25 is committed"),
        Skip("step-10", 10, "version 20 is published"),
    )


def test_steps_after_the_trainers_own_marker_are_left_alone() -> None:
    """Megatron's latest_checkpointed_iteration.txt names the last one that is complete."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10, 20, latest=10), 0.0)
    assert machine.handle(listed(10, 20, latest=10), 50.0) == (Inspect("step-10"),)
    published(machine, 10, 50.0)
    assert machine.handle(listed(10, 20, latest=10), 60.0) == ()
    assert machine.handle(listed(10, 20, latest=20), 61.0) == (Inspect("step-20"),)


def test_an_abandoned_unfinished_one_is_reported_once() -> None:
    """And looked into again when it changes after all."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    machine.handle(listed(10), 5.0)
    machine.handle(Inspected("step-10", FolderResult.UNFINISHED, "model-2 is not there"), 5.0)
    assert machine.handle(listed(10), 99.0) == ()
    (reject,) = machine.handle(listed(10), 100.0)
    assert isinstance(reject, RejectFolder)
    assert "model-2 is not there" in reject.reason
    assert machine.handle(listed(10), 500.0) == ()
    machine.handle(listed(10, s10="b"), 501.0)
    assert machine.handle(listed(10, s10="b"), 506.0) == (Inspect("step-10"),)


def test_a_bad_one_does_not_stop_the_next() -> None:
    """Whether it was found bad before or while it was published."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    machine.handle(listed(10), 5.0)
    assert machine.handle(Inspected("step-10", FolderResult.BAD, "no config"), 5.0) == (
        RejectFolder("step-10", 10, "no config"),
    )
    machine.handle(listed(10, 20), 6.0)
    assert machine.handle(listed(10, 20), 11.0) == (Inspect("step-20"),)
    machine.handle(Inspected("step-20", FolderResult.FINISHED), 11.0)
    assert machine.handle(PublishEnded("step-20", FolderResult.BAD, "it shrank"), 12.0) == (
        RejectFolder("step-20", 20, "it shrank"),
    )
    machine.handle(listed(10, 20, 30), 13.0)
    assert machine.handle(listed(10, 20, 30), 18.0) == (Inspect("step-30"),)


def test_a_publication_that_failed_is_tried_again_later_and_later() -> None:
    """And a newer checkpoint goes first."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    now = 5.0
    for wait_s in (10.0, 20.0, 40.0, 40.0):
        assert machine.handle(listed(10), now) == (Inspect("step-10"),)
        machine.handle(Inspected("step-10", FolderResult.FINISHED), now)
        machine.handle(PublishEnded("step-10", FolderResult.FAILED, "no coordinator"), now)
        assert machine.handle(listed(10), now + wait_s - 0.1) == ()
        now += wait_s
    machine.handle(listed(10, 20), now - 5.0)
    assert machine.handle(listed(10, 20), now) == (Inspect("step-20"),)


def test_an_inspection_that_failed_is_repeated_without_a_change_of_the_folder() -> None:
    """What could not be read says nothing of the checkpoint: it is neither unfinished nor given up as stale."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    now = 5.0
    for wait_s in (10.0, 20.0, 40.0, 40.0, 40.0):
        assert machine.handle(listed(10), now) == (Inspect("step-10"),)
        assert machine.handle(Inspected("step-10", FolderResult.FAILED, "Too many open files"), now) == ()
        assert machine.handle(listed(10), now + wait_s - 0.1) == ()
        now += wait_s
    assert machine.handle(listed(10), now) == (Inspect("step-10"),)
    assert machine.handle(Inspected("step-10", FolderResult.FINISHED), now) == (PublishFolder("step-10", 10),)


def test_two_folders_of_one_version_are_told_apart() -> None:
    """The second by name is rejected: which of them is meant is not guessed."""
    machine = WatchMachine(LIMITS)
    twins = Listed((Folder("run-7", 7, "a"), Folder("step-7", 7, "a")))
    machine.handle(twins, 0.0)
    (reject,) = machine.handle(twins, 5.0)
    assert isinstance(reject, RejectFolder)
    assert (reject.name, "run-7" in reject.reason) == ("step-7", True)
    assert machine.handle(twins, 5.0) == (Inspect("run-7"),)


@pytest.mark.parametrize("version", [10, 30])
def test_a_folder_that_goes_is_forgotten(version: int) -> None:
    """Trainers keep the last few only."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10, 30), 0.0)
    machine.handle(listed(version), 1.0)
    assert machine.handle(listed(version), 5.0) == (Inspect(f"step-{version}"),)


def test_what_changes_after_it_was_published_is_said_once() -> None:
    """It is not published again, for a version never changes; nor would anybody know otherwise that it is another."""
    machine = WatchMachine(LIMITS)
    machine.handle(listed(10), 0.0)
    machine.handle(listed(10), 5.0)
    published(machine, 10, 5.0)
    assert machine.handle(listed(10), 6.0) == ()
    assert machine.handle(listed(10, s10="b"), 7.0) == (FolderChanged("step-10", 10),)
    assert machine.handle(listed(10, s10="c"), 8.0) == ()
    assert machine.handle(listed(10, s10="c"), 80.0) == ()

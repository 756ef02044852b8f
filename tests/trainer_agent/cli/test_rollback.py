"""`weightbus rollback`: back to what the channel had, from its checkpoint, once; refused with a reason otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightbus.control.cli.entry_point import main
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.machine.channel import MAX_HISTORY
from weightbus.control.machine.status import PastStatus
from weightbus.dataplane.transports.disk.checkpoint_files import NOTES, Notes
from weightbus.dataplane.transports.disk.saved_version import SavedVersion
from weightbus.trainer_agent.checkpoints.archive import kept_in
from weightbus.trainer_agent.cli.rollback import other_version, refusal
from weightbus.trainer_agent.machine.errors import BadCheckpoint

from .test_watcher import Scene, write


@pytest.mark.parametrize(
    ("version", "versions", "reason"),
    [
        (9, (7, 9, 7), "committed is 7, which is below: publish it"),
        (8, (5, 7, 9), "never committed there; below the committed 9 there were: 5, 7"),
        (8, (9,), "there were: none"),
        (1, (), "nothing was committed"),
    ],
)
def test_only_to_what_was_there(version: int, versions: tuple[int, ...], reason: str) -> None:
    """The channel's own history decides: below the committed version, and committed before."""
    past = [PastStatus(each, epoch, rollback=False) for epoch, each in enumerate(versions)]
    assert reason in refusal(version, past)


def test_a_version_below_the_committed_one_that_was_there_is_allowed() -> None:
    """There is no reason against it."""
    assert not refusal(7, [PastStatus(7, 1, rollback=False), PastStatus(9, 2, rollback=False)])


def test_a_version_older_than_the_history_is_proven_by_the_files_that_were_kept_of_it() -> None:
    """Only the last versions are remembered: of older ones nothing is claimed, and notes of their epoch decide."""
    history = [PastStatus(1000 + each, 50 + each, rollback=False) for each in range(MAX_HISTORY)]

    def kept(epoch: int) -> SavedVersion:
        return SavedVersion(Path("kept"), Notes(channel="c", epoch=epoch, version=3, manifest="m", table="t"), {}, b"")

    assert not refusal(3, history, kept(epoch=2))
    for files in (None, kept(epoch=50)):
        said = refusal(3, history, files)
        assert "never committed" not in said
        assert "the last 64 committed versions" in said
        assert "(1000 to 1063)" in said
        assert "--save-dir" in said
    assert "never committed" in refusal(3, history[1:], kept(epoch=2)), "the history is complete"


@pytest.mark.parametrize(
    ("version", "kept_in", "same"),
    [
        (1, 1, True),
        (2, 4, True),
        (2, 2, False),
    ],
)
def test_files_are_of_the_version_that_had_its_number_last(version: int, kept_in: int, same: bool) -> None:
    """A channel that went back uses numbers again; going back itself makes no other version of the old number."""
    history = [
        PastStatus(1, 1, rollback=False),
        PastStatus(2, 2, rollback=False),
        PastStatus(1, 3, rollback=True),
        PastStatus(2, 4, rollback=False),
        PastStatus(3, 5, rollback=False),
    ]
    notes = Notes(channel="c", epoch=kept_in, version=version, manifest="m", table="t")
    assert (not other_version(SavedVersion(Path("kept"), notes, {}, b""), version, history)) is same


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Its coordinator and engine are threads of this process."""
    made = Scene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def command(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs the command as an operator would, under a name of its own; returns its exit code and what it said."""
    # The coordinator of this process would go on logging to what the test's end closes.
    monkeypatch.setattr("weightbus.trainer_agent.cli.commands.configure_logging", lambda *_: None)

    def run(version: int, folder: str, *more: str) -> tuple[int, str]:
        fixed = {
            "--channel": "c",
            "--name": "operator",
            "--coordinator": scene.deployment.coordinator,
            "--runtime-dir": str(scene.deployment.root / "run"),
            "--bucket-bytes": "4096",
            "--transport": "local",
            "--checkpoint": str(scene.folder / folder),
            "--acquire-timeout-s": "60",
        }
        flags = [word for pair in fixed.items() for word in pair]
        code = main(["rollback", str(version), *flags, "--insecure-loopback", *more])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_channel_goes_back_once_under_a_new_epoch_and_the_journal_says_so(
    scene: Scene, command: Callable[..., tuple[int, str]]
) -> None:
    """The engine holds the old bits again, bit for bit; asked again, nothing moves; the step back is on record."""
    old = write(scene.folder / "checkpoint-7", 1)
    scene.until(lambda: scene.engine.label == 7)
    write(scene.folder / "checkpoint-9", 2)
    scene.until(lambda: scene.engine.label == 9)
    code, said = command(7, "checkpoint-7")
    assert (code, "version 7 committed" in said) == (0, True), said
    assert scene.engine.label == 7
    assert scene.holds(old)
    moved = scene.transfers()
    code, said = command(7, "checkpoint-7")
    assert (code, "channel c is at version 7 already" in said) == (0, True), said
    assert scene.transfers() == moved
    code, said = command(8, "checkpoint-7")
    assert (code, "does not go back to version 8: committed is 7" in said) == (1, True), said
    write(scene.folder / "checkpoint-12", 3)
    scene.until(lambda: scene.engine.label == 12)
    scene.watcher._disconnect()
    scene.deployment.stop_coordinator()
    journal = SqliteJournal(scene.deployment.root / "journal.sqlite")
    commits = [each for each in journal.audit() if each["record"] == "Committed"]
    journal.close()
    assert [(each["version"], each.get("rollback", False)) for each in commits] == [
        (7, False),
        (9, False),
        (7, True),
        (12, False),
    ]
    epochs = [int(str(each["epoch"])) for each in commits]
    assert epochs == sorted(set(epochs))


def test_what_is_not_held_or_not_known_is_refused_and_nothing_changes(
    scene: Scene, command: Callable[..., tuple[int, str]]
) -> None:
    """A folder without a checkpoint, half of one, a version that never was: a line that says which, exit code 1."""
    write(scene.folder / "checkpoint-7", 1)
    scene.until(lambda: scene.engine.label == 7)
    write(scene.folder / "half", 2, half=True)
    moved = scene.transfers()
    for version, folder, reason in (
        (3, "nowhere", "there is no model.safetensors.index.json"),
        (3, "half", "model-2.safetensors"),
        (3, "checkpoint-7", "it was never committed there"),
    ):
        code, said = command(version, folder)
        assert (code, reason in said) == (1, True), said
    assert (scene.transfers(), scene.engine.label) == (moved, 7)


def test_a_version_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is told apart from a failure: exit code 2."""
    with pytest.raises(SystemExit):
        main(["rollback", "yesterday", "--channel", "c", "--checkpoint", "x"])
    assert "'yesterday' is not a version" in capsys.readouterr().err


def test_after_going_back_the_remembered_range_is_that_of_the_numbers() -> None:
    """The last version of the history is not its highest."""
    history = [PastStatus(1000 + each, 50 + each, rollback=False) for each in range(MAX_HISTORY - 1)]
    back = [*history, PastStatus(1001, 50 + MAX_HISTORY, rollback=True)]
    assert "(1000 to 1062)" in refusal(3, back)


def test_many_kept_versions_are_not_all_listed(tmp_path: Path) -> None:
    """The newest are named, and how many others there are."""
    for version in range(1, 21):
        folder = tmp_path / "policy" / f"checkpoint-{version}"
        folder.mkdir(parents=True)
        (folder / NOTES).write_text("{}")
    with pytest.raises(BadCheckpoint, match=r"kept there are 12 older ones and 13, 14, .*, 20: name a folder"):
        kept_in(tmp_path, "policy", 30)

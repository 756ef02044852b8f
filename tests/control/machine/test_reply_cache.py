"""How rounds ended, by the key of their `Publish`."""

from __future__ import annotations

import msgspec
import pytest

from weightbus.control.machine.channel import RoundReplies, RoundReply
from weightbus.control.machine.states import question
from weightbus.control.protocol.messages import Digest, Epoch, Publish, RefusalCode, RequestId, Version

from ..journal_contract import POLICY, closed

PUBLISH = Publish(
    request=RequestId("p"),
    channel=POLICY,
    epoch=Epoch(1),
    version=Version(1),
    manifest=Digest("a" * 64),
    table=Digest("b" * 64),
    bytes=1,
    buckets=1,
)
OTHER = msgspec.structs.replace(PUBLISH, table=Digest("c" * 64))


@pytest.mark.parametrize(
    ("kept", "asked", "refused"),
    [(question(PUBLISH), PUBLISH, False), (question(PUBLISH), OTHER, True), ("", PUBLISH, False), ("", OTHER, False)],
)
def test_an_answer_that_was_kept_without_its_question_answers_it(kept: str, asked: Publish, refused: bool) -> None:
    """As those of the first release are: a repeated `Publish` gets its end, and is not refused as another one."""
    known = RoundReplies({RequestId("p"): RoundReply(closed("p").done, kept)})
    verdict = known.contradicts(asked)
    assert (verdict is not None and verdict.code is RefusalCode.NOT_ALLOWED) is refused
    later = known.contradicts(msgspec.structs.replace(asked, version=Version(2)))
    assert later is not None, "its version, epoch and channel are known"

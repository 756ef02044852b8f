"""What servers answer, as bytes."""

from __future__ import annotations

import httpcore
import pytest

from weightbus.engine_agent.errors import ServerRefused
from weightbus.engine_agent.wire import _object


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"status":"\xff"}', b"\xff"])
def test_an_answer_that_is_no_object_is_a_refusal(content: bytes) -> None:
    """Text or not: the call has failed, and the agent lives."""
    response = httpcore.Response(200, content=content)
    response.read()
    with pytest.raises(ServerRefused, match="expected a JSON object"):
        _object("/get_server_info", response)

"""Ed25519: trainers sign what they publish, engine agents check it. What is signed says signed_publications.py.

An agent has one secret, its CURVE key; the key it signs with is derived from that. Public halves are 64 hexadecimal
characters. PyNaCl is imported at the first use: the coordinator neither signs nor checks.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from msgspec import Meta

PUBLIC_PATTERN: Final = r"^[0-9a-f]{64}\Z"
SigningKey = Annotated[str, Meta(pattern=PUBLIC_PATTERN)]
"""The public half, which whoever checks has to know."""
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]

_DERIVED_FOR: Final = b"weightbus sign 1"


def signing_key_of(secret: str) -> str:
    """The public half of what the holder of a CURVE `secret` signs with."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  see above

    return bytes(Key(_seed(secret)).verify_key).hex()


def sign(secret: str, statement: bytes) -> str:
    """The signature of the holder of a CURVE `secret` under `statement`."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  see above

    return Key(_seed(secret)).sign(statement).signature.hex()


def signed_by(signing_key: str, statement: bytes, signature: str) -> bool:
    """Whether `signature` is that of the holder of `signing_key`, under exactly these bytes."""
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415  see above
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        VerifyKey(bytes.fromhex(signing_key)).verify(statement, bytes.fromhex(signature))
    except (BadSignatureError, ValueError):
        return False
    return True


def _seed(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("ascii"), digest_size=32, person=_DERIVED_FOR).digest()

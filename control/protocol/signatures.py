"""Ed25519 signatures: trainers sign publications, engine agents verify them (security/signed_publications.py).

An agent has one secret, its CURVE key; its signing key is derived from that. Public keys are 64 hexadecimal characters.
PyNaCl is imported at the first use, because the coordinator neither signs nor verifies.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from msgspec import Meta

PUBLIC_PATTERN: Final = r"^[0-9a-f]{64}\Z"
SigningKey = Annotated[str, Meta(pattern=PUBLIC_PATTERN)]
"""Public signing key, as in the allow-list."""
Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]

_DERIVED_FOR: Final = b"weightbus sign 1"


def signing_key_of(secret: str) -> str:
    """Public signing key that belongs to a CURVE `secret`."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  see above

    return bytes(Key(_seed(secret)).verify_key).hex()


def sign(secret: str, statement: bytes) -> str:
    """Signature of `statement` by the signing key of a CURVE `secret`, in hexadecimal."""
    from nacl.signing import SigningKey as Key  # noqa: PLC0415  see above

    return Key(_seed(secret)).sign(statement).signature.hex()


def signed_by(signing_key: str, statement: bytes, signature: str) -> bool:
    """True if `signature` is `signing_key`'s for exactly these bytes."""
    from nacl.exceptions import BadSignatureError  # noqa: PLC0415  see above
    from nacl.signing import VerifyKey  # noqa: PLC0415

    try:
        VerifyKey(bytes.fromhex(signing_key)).verify(statement, bytes.fromhex(signature))
    except (BadSignatureError, ValueError):
        return False
    return True


def _seed(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode("ascii"), digest_size=32, person=_DERIVED_FOR).digest()

"""Signatures of a checkpoint's record, as minisign makes them: ``minisign -S -m smelt.json``.

The record holds the digest of every file, so one signature covers the checkpoint.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from pathlib import Path

from ...system.errors import SmeltError
from ...system.storage.files import check_regular
from .finding import Finding

SIGNATURE = "smelt.json.minisig"
_CLAIM = "the signature"
_TRUSTED = "trusted comment: "
_LARGEST = 1 << 16


@dataclass(frozen=True)
class PublicKey:
    """A minisign public key.

    Attributes:
        identifier: eight bytes that a signature names its key by.
        key: of Ed25519.
    """

    identifier: bytes
    key: bytes

    @classmethod
    def parse(cls, given: str) -> PublicKey:
        """A key as minisign prints it, or a file that it wrote.

        Raises:
            SmeltError: it is neither.
        """
        text = given
        if not given.startswith("RW") or len(given) != 56:
            path = Path(given)
            try:
                there = path.is_file()
            except (OSError, ValueError):  # too long for a name
                there = False
            if not there:
                raise SmeltError(
                    f"--public-key {given[:80]}: is neither a minisign key (RW… of 56 letters) nor a file with one"
                )
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            text = next((line.strip() for line in lines if line.startswith("RW")), "")
        raw = _decoded(text)
        if len(raw) != 42 or raw[:2] != b"Ed":
            raise SmeltError(
                f"--public-key {given}: is no minisign public key; give the one that `minisign -G` printed"
            )
        return cls(raw[2:10], raw[10:])


def check_signature(checkpoint: Path, record: str, public_key: str | None) -> Finding | None:
    """Verify the signature of a checkpoint's record; None if it has none and none is asked for.

    Args:
        checkpoint: its directory.
        record: the file that is signed.
        public_key: whose signature it should be.

    Raises:
        SmeltError: the key cannot be read, or the package for signatures is missing.
    """
    file = checkpoint / SIGNATURE
    if public_key is None:
        if not file.exists():
            return None
        return Finding(_CLAIM, "not measurable here", "give the public key of who signed it with --public-key")
    key = PublicKey.parse(public_key)
    if not file.exists():
        return Finding(_CLAIM, "not confirmed", f"there is no {SIGNATURE}")
    problem = _problem(file, (checkpoint / record).read_bytes(), key)
    if problem is not None:
        return Finding(_CLAIM, "not confirmed", problem)
    return Finding(_CLAIM, "confirmed", f"{record} is signed with the key {key.identifier[::-1].hex().upper()}")


def _problem(file: Path, message: bytes, key: PublicKey) -> str | None:
    if check_regular(file) > _LARGEST:
        return f"{file.name} is too large for one"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if len(lines) < 4 or not lines[2].startswith(_TRUSTED):
        return f"{file.name} is not in minisign's format"
    raw, comment, whole = _decoded(lines[1]), lines[2].removeprefix(_TRUSTED), _decoded(lines[3])
    if len(raw) != 74 or len(whole) != 64 or raw[:2] not in (b"Ed", b"ED"):
        return f"{file.name} is not in minisign's format"
    if raw[2:10] != key.identifier:
        return f"it was made with another key, {raw[2:10][::-1].hex().upper()}"
    # Since version 0.10 a message's digest is signed, not the message.
    signed = hashlib.blake2b(message).digest() if raw[:2] == b"ED" else message
    if not _holds(key.key, raw[10:], signed):
        return "the record was changed after it was signed"
    if not _holds(key.key, whole, raw[10:] + comment.encode()):
        return "its trusted comment was changed after it was signed"
    return None


def _holds(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise SmeltError("signatures need the package cryptography; install it with pip install cryptography") from None
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        return b""

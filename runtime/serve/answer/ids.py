"""Names of tool calls."""

from __future__ import annotations

import secrets
import string

_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_LENGTH = 9


def call_id() -> str:
    """A new name in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """A new name that Mistral's templates accept: nine letters and digits."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_LENGTH))


def is_mistral_id(text: str) -> bool:
    """Whether Mistral's templates accept it."""
    return len(text) == _MISTRAL_LENGTH and all(character in _ALPHANUMERIC for character in text)

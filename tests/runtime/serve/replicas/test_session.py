"""Which requests share a replica."""

from __future__ import annotations

import json
from typing import Any

import pytest
from smelt.runtime.serve.replicas.session import session_key


def key(header: bytes | None = None, **body: Any) -> str | None:
    return session_key(header, json.dumps(body).encode())


SYSTEM = {"role": "system", "content": "Be kind."}
FIRST = {"role": "user", "content": "Where is London?"}
ANSWER = {"role": "assistant", "content": "In England."}
MORE = {"role": "user", "content": "And Paris?"}


@pytest.mark.parametrize("field", ["messages", "input"])
def test_turns_of_a_conversation_share_one(field: str) -> None:
    begins = key(**{field: [SYSTEM, FIRST]})
    assert begins is not None
    assert key(**{field: [SYSTEM, FIRST, ANSWER, MORE]}, temperature=0) == begins
    assert key(**{field: [SYSTEM, MORE]}) != begins, "others have the same system prompt"
    assert key(**{field: [SYSTEM, FIRST]}, model="other") != begins


def test_prompts_that_begin_alike_share_one() -> None:
    long = "word " * 500
    assert key(prompt=long + "a") == key(prompt=long + "b") != key(prompt="a")
    assert key(prompt=[[5] * 300]) == key(prompt=[5] * 400) != key(prompt=[6] * 300)


def test_the_header_decides() -> None:
    assert key(b"mine", prompt="a") == key(b"mine", prompt="b") != key(b"yours", prompt="a")


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"prompt": []}', b'{"messages": 5}', b"{}"]
)
def test_what_has_no_beginning_may_go_anywhere(body: bytes) -> None:
    assert session_key(None, body) is None

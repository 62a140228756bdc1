"""What one request may cost: more is refused before anything is computed."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from ..serving import Serving


def _tools(names: list[str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        ("completions", {"stop": ["x"] * 65}, "64"),
        ("completions", {"stop": "x" * 1025}, "1024"),
        ("completions", {"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "1024"),
        ("completions", {"stop_token_ids": list(range(1025))}, "1024"),
        ("completions", {"prompt_logprobs": 21}, "20"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed"),
        ("completions", {"prompt_logprobs": 20, "prompt": [[1] * 100] * 128}, "268,800 log probabilities"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed"),
        ("chat/completions", {"tools": _tools([f"f{i}" for i in range(1025)])}, "1025 tools"),
        ("chat/completions", {"tools": _tools(["f" * 257])}, "at most 256 characters"),
        ("chat/completions", {"tools": _tools(["f", "g", "f"])}, "Two tools are named 'f'"),
        ("chat/completions", {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template is no variable"),
        ("completions", {"prompt": [0] * 100_000 + [None]}, "prompt"),
        ("completions", {"prompt": "lorem " * 100_000}, "the prompt has 600000 characters"),
        ("embeddings", {"input": "lorem " * 100_000}, "the prompt has 600000 characters"),
        ("chat/completions", {"messages": [{"role": "user", "content": "lorem " * 100_000}]}, "more than these can hold"),
    ],
)  # fmt: skip
def test_too_much_is_refused(server: Serving, path: str, fields: dict[str, Any], says: str) -> None:
    usual = {"prompt": "The"} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    usual = {} if path == "embeddings" else {"max_tokens": 1, **usual}
    answer = httpx2.post(f"{server.url}/v1/{path}", json={"model": "smelt-6m", **usual, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert len(answer.text) < 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("v1/completions", b'{"prompt": "\\ud800", "max_tokens": 1}'),
        ("v1/embeddings", b'{"input": "a \\ud800"}'),
        ("v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'),
        ("tokenize", b'{"prompt": "\\ud800"}'),
    ],
)
def test_halves_of_characters_are_refused(server: Serving, path: str, body: bytes) -> None:
    """Legal in JSON, but no text that a tokenizer takes."""
    found = httpx2.post(f"{server.url}/{path}", content=body, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert "surrogate" in found.json()["error"]["message"]


def test_prompts_have_log_probabilities(server: Serving) -> None:
    body = {"model": "smelt-6m", "max_tokens": 1, "prompt": "The house was", "prompt_logprobs": 20}
    (choice,) = httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"]
    assert all(20 <= len(each) <= 21 for each in choice["prompt_logprobs"][1:])

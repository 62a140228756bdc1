"""A checkpoint's tokenizer as the fields of a GGUF file."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from ...system.errors import SmeltError
from .gguf_pretokenizers import pre_tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Tokens that no merge makes are the last that llama.cpp assembles.
_LAST = -1e6


@dataclass
class Tokenizer:
    """A file's description of the tokenizer.

    Attributes:
        fields: by their full names.
        notes: where llama.cpp may tokenize text differently, one sentence each.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tokenizer_of(tokenizer: PreTrainedTokenizerBase, rows: int, ends: list[int]) -> Tokenizer:
    """The fields that make llama.cpp tokenize text as a tokenizer does.

    Args:
        tokenizer: as transformers opens it.
        rows: of the embedding; the file needs that many tokens.
        ends: the model's EOS tokens, for a tokenizer that names none and for those after the first.

    Raises:
        SmeltError: llama.cpp has no tokenizer of this kind.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SmeltError("its tokenizer has no tokenizer.json, which the export needs; save it as one")
    data = json.loads(backend.to_str())
    kind = data["model"]["type"]
    if kind != "BPE":
        raise SmeltError(f"its tokenizer is of the kind {kind}; only BPE tokenizers can be exported")
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise SmeltError(
            f"its tokenizer has token id {highest}, but the embedding has only {rows} rows; llama.cpp rejects that"
        )
    found = Tokenizer()
    if _is_sentencepiece(data):
        _sentencepiece(found, data, rows)
    else:
        _byte_level(found, data, rows)
    _special(found, tokenizer, ends)
    return found


def _is_sentencepiece(data: dict[str, Any]) -> bool:
    """Whether spaces are visible characters and unknown characters become bytes."""
    return bool(data["model"].get("byte_fallback"))


def _byte_level(found: Tokenizer, data: dict[str, Any], rows: int) -> None:
    known = pre_tokenizer_of(data)
    if known is None:
        found.notes.append(
            "llama.cpp does not know this tokenizer's pre-tokenizer; it uses its default and may tokenize text differently"
        )
    elif known.differs:
        found.notes.append(known.differs)
    if data.get("normalizer") is not None:
        kind = data["normalizer"]["type"]
        found.notes.append(
            f"llama.cpp does not normalize text ({kind}), so text that this changes is tokenized differently"
        )
    tokens, types = _tokens(data, rows)
    found.fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": known.name if known else "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(data)],
    }


def _sentencepiece(found: Tokenizer, data: dict[str, Any], rows: int) -> None:
    tokens, types = _tokens(data, rows)
    merges = _merges(data)
    made: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        made.setdefault(left + right, rank)
    unknown = data["model"].get("unk_token")
    scores = [float(-made[token]) if token in made else _LAST for token in tokens]
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if token == unknown:
            types[i] = int(TokenType.UNKNOWN)
        elif kind == TokenType.NORMAL and _BYTE.fullmatch(token):
            types[i] = int(TokenType.BYTE)
        elif kind == TokenType.USER_DEFINED:
            tokens[i] = token.replace(_SPACE, " ")
    found.fields |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": _prefixes_space(data),
    }
    unlisted = _unlisted_merges(made, {(left, right) for left, right in merges}, set(data["model"]["vocab"]))
    if unlisted:
        found.notes.append(
            f"llama.cpp merges any two tokens that make a third; this tokenizer lacks {unlisted} such merges, so text may be tokenized differently"
        )


def _tokens(data: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and type of each token; embedding rows without a token get a name that is never used."""
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, i in data["model"]["vocab"].items():
        tokens[i], types[i] = token, int(TokenType.NORMAL)
    for added in data["added_tokens"]:
        i = added["id"]
        tokens[i] = added["content"]
        types[i] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    return tokens, types


def _merges(data: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in data["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def _prefixes_space(data: dict[str, Any]) -> bool:
    """Whether a space is prepended to text."""
    steps = [step for step in (data.get("normalizer"), data.get("pre_tokenizer")) if step is not None]
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
        if step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"):
            return True
    return False


def _unlisted_merges(made: dict[str, int], pairs: set[tuple[str, str]], vocabulary: set[str]) -> int:
    """How many pairs of tokens make a third without a listed merge."""
    return sum(
        (token[:cut], token[cut:]) not in pairs
        for token in made
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    )


def _special(found: Tokenizer, tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> None:
    begin, end, fill, unknown = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
    if end is None and ends:
        end = ends[0]
    if end is None:
        found.notes.append(
            "neither the tokenizer nor the model has an end-of-sequence token, so llama.cpp does not stop by itself"
        )
    ids = {"bos": begin, "eos": end, "padding": fill, "unknown": unknown}
    others = [i for i in ends if i != end]
    if others:
        ids["eot"] = others[0]
    for name, i in ids.items():
        if i is not None:
            found.fields[f"tokenizer.ggml.{name}_token_id"] = int(i)
    plain, special = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    found.fields["tokenizer.ggml.add_bos_token"] = bool(special[:1] == [begin] and plain[:1] != [begin])
    found.fields["tokenizer.ggml.add_eos_token"] = bool(special[-1:] == [end] and plain[-1:] != [end])
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        found.fields["tokenizer.chat_template"] = template

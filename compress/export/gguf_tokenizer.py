"""A checkpoint's tokenizer as the fields of a GGUF file."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
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
# What llama.cpp takes for the end where the file names none.
_ENDS_UNNAMED = {"gpt2": 11, "llama": 2}
# Names by which llama.cpp recognizes further ends.
_KNOWN_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"}


@dataclass
class Tokenizer:
    """A file's description of the tokenizer.

    Attributes:
        fields: by their full names.
        notes: where llama.cpp may tokenize text differently, one sentence each.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tokenizer_of(tokenizer: PreTrainedTokenizerBase, rows: int, ends: list[int], begin: int | None = None) -> Tokenizer:
    """The fields that make llama.cpp tokenize text as a tokenizer does.

    Args:
        tokenizer: as transformers opens it.
        rows: of the embedding; the file needs that many tokens.
        ends: the model's EOS tokens, for a tokenizer that names none and for those after the first.
        begin: the model's BOS token, for a tokenizer that names none.

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
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if data["model"].get(name):
            raise SmeltError(f"its tokenizer has a {name} ({data['model'][name]!r}), which llama.cpp's have not")
    found = Tokenizer()
    if any(step["type"] == "ByteLevel" for step in _steps(data)):
        _byte_level(found, data, rows)
    elif data["model"].get("byte_fallback"):
        _sentencepiece(found, data, rows)
    else:
        raise SmeltError(
            "its BPE tokenizer neither works on bytes (ByteLevel) nor falls back to them (byte_fallback); llama.cpp has no"
            " such tokenizer"
        )
    twice = [token for token, count in Counter(found.fields["tokenizer.ggml.tokens"]).items() if count > 1]
    if twice:
        raise SmeltError(f"two of its tokens are {twice[0]!r} for llama.cpp, which rejects that")
    _special(found, tokenizer, ends, begin)
    found.notes += _of_added_tokens(data)
    return found


def _steps(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What happens to text before tokens are looked up, one step after another."""
    left = [step for step in (data.get("pre_tokenizer"), data.get("normalizer")) if step is not None]
    while left:
        step = left.pop()
        inner = step.get("normalizers", []) + step.get("pretokenizers", [])
        left += reversed(inner)
        if not inner:
            yield step


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
    if not _merges(data):
        raise SmeltError("its tokenizer has no merges, without which llama.cpp loads none")
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
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    unlisted = _unlisted_merges(normal, set(merges))
    if unlisted:
        found.notes.append(
            f"llama.cpp merges any two tokens that make a third; this tokenizer lacks {unlisted} such merges, so text may be tokenized differently"
        )
    others = sorted({step["type"] for step in _steps(data) if not _is_sentencepieces(step)})
    if others:
        found.notes.append(
            f"llama.cpp does not change or split text as this tokenizer does ({', '.join(others)}), so text that this concerns is tokenized differently"
        )


def _is_sentencepieces(step: dict[str, Any]) -> bool:
    """Whether a step is one of those that make spaces visible, as llama.cpp does."""
    pattern = step.get("pattern")
    return (
        step["type"] in ("Prepend", "Metaspace")
        or (step["type"] == "Replace" and pattern == {"String": " "} and step["content"] == _SPACE)
        or (step["type"] == "Split" and pattern == {"String": " "})  # Gemma's, of which none are left by then
    )


def _tokens(data: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """The text and type of each token; embedding rows without a token get a name that is never used."""
    named = {i: (token, TokenType.NORMAL) for token, i in data["model"]["vocab"].items()}
    for added in data["added_tokens"]:
        named[added["id"]] = added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    known = {token for token, _ in named.values()}
    tokens, types = [], []
    for i in range(rows):
        token, kind = named.get(i, (f"[PAD{i}]", TokenType.UNUSED))
        while i not in named and token in known:
            token += "_"
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _merges(data: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in data["model"]["merges"]]
    return [(left, right) for left, right in pairs]


def _prefixes_space(data: dict[str, Any]) -> bool:
    """Whether a space is prepended to text."""
    return any(
        step["type"] == "Prepend" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        for step in _steps(data)
    )


def _unlisted_merges(tokens: set[str], pairs: set[tuple[str, str]]) -> int:
    """How many pairs of tokens make a third without a listed merge."""
    return sum(
        (token[:cut], token[cut:]) not in pairs
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in tokens and token[cut:] in tokens
    )


def _special(found: Tokenizer, tokenizer: PreTrainedTokenizerBase, ends: list[int], begin: int | None) -> None:
    own, end, fill, unknown = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk"))
    tokens = found.fields["tokenizer.ggml.tokens"]
    if own is None and begin is not None and 0 <= begin < len(tokens):
        own = begin
    if end is None and ends:
        end = ends[0]
    if end is None:
        end = _no_end(found)
    ids = {"bos": own, "eos": end, "padding": fill, "unknown": unknown}
    others = [i for i in ends if i != end and i < len(tokens)]
    ids |= dict(zip(("eot", "eom"), others, strict=False))
    unnamed = [tokens[i] for i in others[2:] if tokens[i] not in _KNOWN_ENDS]
    if unnamed:
        found.notes.append(
            f"the model's outputs also end with {', '.join(unnamed)}, with which they do not in llama.cpp"
        )
    for name, i in ids.items():
        if i is not None:
            found.fields[f"tokenizer.ggml.{name}_token_id"] = int(i)
    plain, special = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    begins, stops = (
        (bool(special[:1] == [own] and plain[:1] != [own])),
        (bool(special[-1:] == [end] and plain[-1:] != [end])),
    )
    found.fields["tokenizer.ggml.add_bos_token"] = begins
    found.fields["tokenizer.ggml.add_eos_token"] = stops
    if special != [own] * begins + plain + [end] * stops:
        found.notes.append(
            "its tokenizer adds tokens around texts that llama.cpp does not: it knows a first and a last one"
        )
    _templates(found, tokenizer)


def _no_end(found: Tokenizer) -> int | None:
    """An end that never comes, since without one llama.cpp takes some token for it."""
    what = "neither the tokenizer nor the model has an end-of-sequence token"
    types = found.fields["tokenizer.ggml.token_type"]
    if int(TokenType.UNUSED) in types:
        found.notes.append(f"{what}, so llama.cpp does not stop by itself")
        return types.index(int(TokenType.UNUSED))
    tokens, usual = found.fields["tokenizer.ggml.tokens"], _ENDS_UNNAMED[found.fields["tokenizer.ggml.model"]]
    if usual < len(tokens):
        found.notes.append(f"{what}; llama.cpp then stops at token {usual}, which is {tokens[usual]!r}")
    return None


def _templates(found: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """The chat template, and those with names beside it."""
    template = getattr(tokenizer, "chat_template", None)
    named = template if isinstance(template, dict) else {"default": template} if template else {}
    default = next((name for name in ("default", *named) if name in named), None)
    if default is None:
        return
    found.fields["tokenizer.chat_template"] = named[default]
    if default != "default":
        found.notes.append(f"no chat template is the default one; llama.cpp uses {default!r}")
    others = [name for name in named if name != default]
    found.fields |= {f"tokenizer.chat_template.{name}": named[name] for name in others}
    if others:
        found.fields["tokenizer.chat_templates"] = others


def _of_added_tokens(data: dict[str, Any]) -> list[str]:
    strict = [t for t in data["added_tokens"] if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if not strict:
        return []
    return [
        f"{len(strict)} added tokens ({strict[0]['content']} is one) take in spaces beside them, or are found as whole words"
        " only; llama.cpp looks for their text alone"
    ]

"""Which of llama.cpp's pre-tokenizers matches a tokenizer, found by what it does and not by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Known:
    """One of llama.cpp's pre-tokenizers.

    Attributes:
        name: its name there.
        cuts: the regular expressions that split text, in order.
        whole_words: whether a word that is a token is taken without merging (``ignore_merges``).
        differs: where llama.cpp still splits differently.
    """

    name: str
    cuts: tuple[str, ...]
    whole_words: bool = False
    differs: str | None = None


_ASCII = "llama.cpp distinguishes upper and lower case only in English letters, so words in others may be tokenized differently"

KNOWN = (
    Known("gpt-2", (_GPT2,)),
    Known("smollm", (_DIGIT, _GPT2)),
    Known("llama-bpe", (rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True),
    Known("dbrx", (rf"{_SUFFIXES}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",)),
    Known("qwen2", (rf"{_SUFFIXES}|{_WORDS}|\p{{N}}|{_REST}",)),
    Known(
        "gpt-4o",
        (rf"{_CASED[0]}{_SUFFIXES}?|{_CASED[1]}{_SUFFIXES}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",),
        differs=_ASCII,
    ),
    Known("tekken", (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_WITH_SLASH}",), whole_words=True, differs=_ASCII),
)


def pre_tokenizer_of(tokenizer: dict[str, Any]) -> Known | None:
    """llama.cpp's equivalent of a ``tokenizer.json``'s pre-tokenizer; None if it has none."""
    cuts = _cuts(tokenizer.get("pre_tokenizer"))
    whole_words = bool(tokenizer["model"].get("ignore_merges"))
    for known in KNOWN:
        if cuts == known.cuts and whole_words == known.whole_words:
            return known
    return None


def _cuts(step: dict[str, Any] | None) -> tuple[str, ...] | None:
    """The regular expressions of a pre-tokenizer; None if it does anything else."""
    if step is None:
        return ()
    kind = step["type"]
    if kind == "Sequence":
        each = [_cuts(inner) for inner in step["pretokenizers"]]
        known = [cuts for cuts in each if cuts is not None]
        return None if len(known) < len(each) else tuple(cut for cuts in known for cut in cuts)
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return (_GPT2,) if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return (_DIGIT,)
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return (step["pattern"]["Regex"],)
    return None

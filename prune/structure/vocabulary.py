"""A tokenizer with only some of its tokens, which tokenizes text as before if these suffice.

A text that the whole tokenizer splits into kept tokens is split into the same ones: for BPE, all tokens that kept ones
are merged from are kept too, and so are their merges; for Unigram, the best segmentation is still available.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from ...system.errors import SmeltError
from ...system.storage.files import write_text

# Other files with the whole vocabulary, which would contradict tokenizer.json.
_STALE = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


class Vocabulary:
    """The tokens of a model directory's ``tokenizer.json``.

    Args:
        directory: the model directory.

    Raises:
        SmeltError: the file is missing, or its model is not supported.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        try:
            self._data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SmeltError(f"{directory}: has no tokenizer.json, which vocabulary pruning needs") from None
        except ValueError as error:
            raise SmeltError(f"{path}: is not valid JSON ({error}); download it again") from None
        model = self._data["model"]
        kind = model.get("type") or ("Unigram" if isinstance(model.get("vocab"), list) else "BPE")
        if kind not in ("BPE", "Unigram"):
            raise SmeltError(f"{path}: holds a {kind} model; Smelt prunes only BPE and Unigram vocabularies")
        self._kind: str = kind
        pieces = (
            ((piece, i) for i, (piece, _) in enumerate(model["vocab"])) if kind == "Unigram" else model["vocab"].items()
        )
        self.ids: dict[str, int] = {
            **dict(pieces),
            **{each["content"]: each["id"] for each in self._data["added_tokens"]},
        }

    def closed(self, used: Iterable[int], rows: int | None = None) -> list[int]:
        """These tokens, and all that must be kept with them: special ones, bytes, and those they are merged from; in order.

        Args:
            used: the tokens.
            rows: of the embedding; added tokens beyond it, which other models of a family have, are removed.
        """
        kept = set(used) | {each["id"] for each in self._data["added_tokens"]} | self._bytes()
        model = self._data["model"]
        if isinstance(model.get("unk_token"), str):
            kept.add(self.ids[model["unk_token"]])
        if isinstance(model.get("unk_id"), int):
            kept.add(model["unk_id"])
        if self._kind == "BPE":
            parts: dict[int, list[int]] = {}
            for left, right in self._merges():
                parts.setdefault(self.ids[left + right], []).extend((self.ids[left], self.ids[right]))
            waiting = list(kept)
            while waiting:
                for part in parts.get(waiting.pop(), ()):
                    if part not in kept:
                        kept.add(part)
                        waiting.append(part)
        return sorted(token for token in kept if rows is None or token < rows)

    def write(self, kept: list[int], target: Path) -> None:
        """Write the smaller tokenizer to a model directory, renumber tokens in its files, and remove the rest."""
        new = {old: number for number, old in enumerate(kept)}
        data = json.loads(json.dumps(self._data))
        model = data["model"]
        if self._kind == "Unigram":
            model["vocab"] = [each for i, each in enumerate(model["vocab"]) if i in new]
            if isinstance(model.get("unk_id"), int):
                model["unk_id"] = new[model["unk_id"]]
        else:
            model["vocab"] = {token: new[old] for token, old in model["vocab"].items() if old in new}
            as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)
            model["merges"] = [
                f"{left} {right}" if as_text else [left, right]
                for left, right in self._merges()
                if {self.ids[left], self.ids[right], self.ids[left + right]} <= new.keys()
            ]
        data["added_tokens"] = [each | {"id": new[each["id"]]} for each in data["added_tokens"] if each["id"] in new]
        _renumber_processor(data.get("post_processor"), new)
        write_text(target / "tokenizer.json", json.dumps(data, ensure_ascii=False) + "\n")
        for name in _STALE:
            (target / name).unlink(missing_ok=True)
        self._renumber_files(new, target)

    def _renumber_files(self, new: dict[int, int], target: Path) -> None:
        for name in ("tokenizer_config.json", "added_tokens.json", "generation_config.json"):
            path = target / name
            if not path.is_file():
                continue
            data = json.loads(path.read_text(encoding="utf-8"))
            if name == "added_tokens.json":
                data = {token: new[old] for token, old in data.items() if old in new}
            elif name == "tokenizer_config.json" and "added_tokens_decoder" in data:
                data["added_tokens_decoder"] = {
                    str(new[int(old)]): each for old, each in data["added_tokens_decoder"].items() if int(old) in new
                }
            elif name == "generation_config.json":
                data |= renumbered(data, new) | _renumbered_lists(data, new)
            write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def _bytes(self) -> set[int]:
        """The tokens that spell any other text."""
        if self._data["model"].get("byte_fallback"):
            return {self.ids[name] for i in range(256) if (name := f"<0x{i:02X}>") in self.ids}
        if "ByteLevel" in json.dumps([self._data.get("pre_tokenizer"), self._data.get("decoder")]):
            return {self.ids[each] for each in ByteLevel.alphabet() if each in self.ids}
        return {number for token, number in self.ids.items() if len(token) == 1}

    def _merges(self) -> Iterable[tuple[str, str]]:
        for each in self._data["model"]["merges"]:
            left, right = each.split(" ") if isinstance(each, str) else each
            yield left, right


def renumbered(data: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    """The fields of a configuration with token ids, renumbered."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        if not name.endswith(("_token_id", "_token_ids")) or value is None:
            continue
        if isinstance(value, list):
            found[name] = [new[each] for each in value if each in new]
        elif isinstance(value, int):
            found[name] = new.get(value)
    return found


def _renumbered_lists(data: dict[str, Any], new: dict[int, int]) -> dict[str, Any]:
    """The fields of ``generation_config.json`` that forbid tokens; what names a removed token is always forbidden."""
    found: dict[str, Any] = {}
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        if data.get(name):
            found[name] = [new[each] for each in data[name] if each in new] or None
    if data.get("bad_words_ids"):
        words = [word for word in data["bad_words_ids"] if all(each in new for each in word)]
        found["bad_words_ids"] = [[new[each] for each in word] for word in words] or None
    return found


def _renumber_processor(processor: dict[str, Any] | None, new: dict[int, int]) -> None:
    if processor is None:
        return
    for each in processor.get("processors", []):
        _renumber_processor(each, new)
    special = processor.get("special_tokens")
    for each in special.values() if isinstance(special, dict) else []:
        each["ids"] = [new[old] for old in each["ids"]]
    for name in ("sep", "cls"):
        if isinstance(processor.get(name), list):
            processor[name][1] = new[processor[name][1]]

"""Text, and windows of token ids cut from it."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..system.errors import SmeltError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BUILTIN = Path(__file__).parent / "builtin" / "corpus"
# A seed chooses windows among this many times as many as are asked for; the rest of a huge source is not read.
_CHOICE = 16
_SHORTEST = 2  # window that a recipe may ask for
_SEPARATOR = "\n\n"
# Characters given to the tokenizer at once. It takes some fifty times as much memory as its text.
_PIECE = 1 << 16


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Attributes:
        name: ``builtin``, a .txt or .jsonl file, or a Hugging Face dataset.
        half: ``calibration`` or ``evaluation``: which half of the builtin corpus is meant.
        field: the field of JSONL records and dataset rows that holds the text.
        split, config: of a Hugging Face dataset.
    """

    name: str
    half: str
    field: str = "text"
    split: str = "train"
    config: str | None = None

    @property
    def label(self) -> str:
        """What to call it."""
        return f"the builtin {self.half} text" if self.name == "builtin" else self.name

    def documents(self) -> Iterator[str]:
        """The source's documents, read as they are asked for."""
        if self.name == "builtin":
            yield from _jsonl(_BUILTIN / f"{self.half}.jsonl", "text")
            return
        path = Path(self.name).expanduser()
        if path.is_file():
            yield from _jsonl(path, self.field) if path.suffix == ".jsonl" else _plain(path)
        elif path.suffix in (".txt", ".jsonl"):
            raise SmeltError(f"{self.name}: there is no such text file; check the path")
        else:
            yield from self._dataset()

    def beginning_digest(self) -> str:
        """Of its first characters: equal for the same text, wherever it lies and however it is cut into tokens."""
        digest, left = hashlib.sha256(), _PIECE
        for document in self.documents():
            digest.update(str(document)[:left].encode())
            left -= len(str(document))
            if left <= 0:
                break
        return digest.hexdigest()

    def problem(self) -> str | None:
        """What can be known to be wrong without reading the source."""
        path = Path(self.name).expanduser()
        if self.name != "builtin" and path.suffix in (".txt", ".jsonl") and not path.is_file():
            return f"{self.name}: there is no such text file; check the path"
        return None

    def _dataset(self) -> Iterator[str]:
        import datasets

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
            for row in rows:
                if self.field not in row:
                    raise SmeltError(
                        f"{self.name}: rows have no field {self.field!r}; there is {', '.join(row)}; set field"
                    )
                yield row[self.field]
        except SmeltError:
            raise
        except Exception as error:  # the datasets library raises from many others
            first = str(error).strip().split("\n")[0] or type(error).__name__
            raise SmeltError(
                f"{self.name}: is neither a text file nor a dataset that can be loaded ({first})"
            ) from None


@dataclass(frozen=True)
class Windows:
    """Token ids ``[windows, length]`` and the digest that identifies them."""

    tokens: Tensor
    fingerprint: str

    def first(self, count: int) -> Windows:
        """The first of them."""
        return _fingerprinted(self.tokens[:count])


def calibration_windows(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int
) -> Windows:
    """Windows that a seed chooses among the source's first ones. They do not overlap.

    Raises:
        SmeltError: the source has fewer than ``samples`` windows of ``length`` tokens.
    """
    begin = beginning(tokenizer)
    own = length - len(begin)
    stream = _tokens(source, tokenizer, samples * own * _CHOICE)
    available = len(stream) // own
    if available < samples:
        raise SmeltError(
            f"{source.label}: too short: {samples} samples of {length} tokens need {samples * own} tokens,"
            f" it has {len(stream)}; {_fewer(available, len(stream) // samples + len(begin))}give more text"
        )
    windows = _begun(stream[: available * own].view(available, own), begin)
    chosen = torch.randperm(available, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return _fingerprinted(windows[chosen])


def evaluation_windows(source: TextSource, tokenizer: PreTrainedTokenizerBase, most: int, length: int) -> Windows:
    """The source's first windows, as many as there are up to ``most``."""
    begin = beginning(tokenizer)
    own = length - len(begin)
    stream = _tokens(source, tokenizer, most * own)
    available = min(most, len(stream) // own)
    if available == 0:
        raise SmeltError(
            f"{source.label}: too short: it has {len(stream)} tokens, less than one window of {length};"
            " lower length or give more text"
        )
    return _fingerprinted(_begun(stream[: available * own].view(available, own), begin))


def used_tokens(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """All tokens that a source is cut into, from its beginning to its end.

    Raises:
        SmeltError: it holds no text.
    """
    used: set[int] = set()
    for document in source.documents():
        if not isinstance(document, str):
            raise SmeltError(f"{source.label}: holds {type(document).__name__}, not text; set field")
        for piece in _pieces(document):
            if piece.strip():
                used.update(tokenizer(piece, verbose=False).input_ids)
    if not used:
        raise SmeltError(f"{source.label}: holds no text; give a source with text in it")
    return used | set(tokenizer(_SEPARATOR, add_special_tokens=False).input_ids)


def recut(tokens: Tensor, before: PreTrainedTokenizerBase, after: PreTrainedTokenizerBase) -> Tensor:
    """Windows of the same text, as another tokenizer cuts it: as many, and as long."""
    begin, old = beginning(after), len(beginning(before))
    own = tokens.shape[1] - len(begin)
    ids: list[int] = []
    for text in before.batch_decode(tokens[:, old:], clean_up_tokenization_spaces=False):
        ids.extend(after(text, add_special_tokens=False, verbose=False).input_ids)
    short = len(tokens) * own - len(ids)
    if short > 0:  # what is decoded and cut again may come out a little shorter
        ids.extend((ids * (short // len(ids) + 1))[:short])
    return _begun(torch.tensor(ids[: len(tokens) * own]).view(len(tokens), own), begin)


def fingerprint(tokens: Tensor) -> str:
    """A digest of token ids."""
    return hashlib.sha256(repr(tuple(tokens.shape)).encode() + tokens.to(torch.int64).numpy().tobytes()).hexdigest()


def beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token that the tokenizer begins every text with, for models (Llama, Gemma) that always saw one."""
    ids, bos = tokenizer("a").input_ids, tokenizer.bos_token_id
    return [bos] if isinstance(bos, int) and ids[:1] == [bos] else []


def _begun(windows: Tensor, begin: list[int]) -> Tensor:
    return (
        torch.cat((torch.tensor([begin], dtype=torch.int64).expand(len(windows), -1), windows), dim=1)
        if begin
        else windows
    )


def _fingerprinted(tokens: Tensor) -> Windows:
    return Windows(tokens.contiguous(), fingerprint(tokens))


def _fewer(samples: int, length: int) -> str:
    """What there is text enough for: fewer samples as long, or as many shorter ones; nothing, if neither."""
    if samples:
        return f"ask for {samples} samples or "
    return f"ask for a length of at most {length} or " if length >= _SHORTEST else ""


def token_pieces(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """A source's tokens, as its text is read, with a separator between documents.

    Raises:
        SmeltError: it holds no text.
    """
    separator = tokenizer(_SEPARATOR, add_special_tokens=False).input_ids
    empty = True
    for document in source.documents():
        if not isinstance(document, str):
            raise SmeltError(
                f"{source.name}: field {source.field!r} holds {type(document).__name__}, not text; set field"
            )
        if not document.strip():
            continue
        if not empty:
            yield list(separator)
        empty = False
        for piece in _pieces(document):
            yield tokenizer(piece, add_special_tokens=False, verbose=False).input_ids
    if empty:
        raise SmeltError(f"{source.label}: holds no text; give a source with text in it")


def _tokens(source: TextSource, tokenizer: PreTrainedTokenizerBase, enough: int) -> Tensor:
    ids: list[int] = []
    for piece in token_pieces(source, tokenizer):
        ids.extend(piece)
        if len(ids) >= enough:
            break
    return torch.tensor(ids[:enough], dtype=torch.int64)


def _pieces(document: str) -> Iterator[str]:
    """A long document in pieces that begin with a line, or with a word where lines are long."""
    start = 0
    while len(document) - start > _PIECE:
        cut = max(document.rfind("\n", start, start + _PIECE) + 1, start)
        if cut == start:
            cut = document.rfind(" ", start + 1, start + _PIECE)
        if cut <= start:
            cut = start + _PIECE
        yield document[start:cut]
        start = cut
    yield document[start:]


def _plain(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept = ""
    offset = 0
    with _opened(path) as file:
        while True:
            block = file.read(_PIECE)
            try:
                kept += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise SmeltError(
                    f"{path}: is not UTF-8 text (near byte {offset + error.start}); convert it to UTF-8"
                ) from None
            offset += len(block)
            if not block:
                break
            cut = kept.rfind("\n\n")
            if cut > 0 and len(kept) > _PIECE:
                yield kept[:cut]
                kept = kept[cut + 2 :]
    yield kept


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError:
                raise SmeltError(f"{path}:{number}: is not UTF-8 text; convert the file to UTF-8") from None
            except ValueError as error:
                raise SmeltError(f"{path}:{number}: is not JSON ({error}); each line must be one JSON object") from None
            if not isinstance(record, dict) or field not in record:
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise SmeltError(f"{path}:{number}: has no field {field!r}; there is {found}; set field")
            yield record[field]


def _opened(path: Path):  # type: ignore[no-untyped-def]
    try:
        return path.open("rb")
    except OSError as error:
        raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None

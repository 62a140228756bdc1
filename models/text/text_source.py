"""Where text comes from: the builtin corpus, text and JSONL files, and datasets."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...system.errors import SmeltError, first_line
from ...system.plain_data import is_unicode
from ...system.storage.paths import irregular, named_path

_BUILTIN = Path(__file__).parents[1] / "builtin" / "corpus"
# Bytes read at once; also how much of a text's beginning identifies it.
_PIECE = 1 << 16
# The datasets library scans a directory once for each of dozens of patterns.
_MOST_FILES = 10_000


@dataclass(frozen=True)
class TextSource:
    """Where text comes from.

    Attributes:
        name: ``builtin``, a .txt or .jsonl file, or a Hugging Face dataset.
        half: ``calibration`` or ``evaluation``: which half of the builtin corpus to use.
        field: the field of JSONL records and dataset rows that holds the text.
        split, config: of a Hugging Face dataset.
        completion: the field of what is to be learned, if ``field`` is only its prompt.
    """

    name: str
    half: str
    field: str = "text"
    split: str = "train"
    config: str | None = None
    completion: str | None = None

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return f"the builtin {self.half} text" if self.name == "builtin" else self.name

    @property
    def is_one_document(self) -> bool:
        """Whether what :meth:`documents` gives are pieces of one text."""
        return named_path(self.name).suffix != ".jsonl" and named_path(self.name).is_file()

    def documents(self) -> Iterator[str]:
        """The source's documents, read as they are asked for."""
        return (record[0] for record in self.records(self.field))

    def records(self, *fields: str) -> Iterator[tuple[Any, ...]]:
        """Some fields of each document; a text file has one, whatever it is called."""
        if self.name == "builtin":
            yield from _jsonl(_BUILTIN / f"{self.half}.jsonl", ("text",))
            return
        problem = self.problem()
        if problem is not None:
            raise SmeltError(problem)
        path = named_path(self.name)
        if path.is_file():
            yield from _read(path, fields)
        else:
            yield from self._dataset(fields)

    def beginning_digest(self) -> str:
        """A digest of its first characters: equal for the same text, regardless of its path and tokenizer."""
        digest, left = hashlib.sha256(), _PIECE
        for document in self.documents():
            digest.update(str(document)[:left].encode())
            left -= len(str(document))
            if left <= 0:
                break
        return digest.hexdigest()

    def problem(self) -> str | None:
        """What is wrong, as far as can be known without reading the source."""
        if self.name == "builtin":
            return None
        path = named_path(self.name)
        kind = irregular(path)
        if kind not in (None, "a directory"):
            return f"{self.name}: is {kind}, not a text file; write its text to a file"
        if path.suffix in (".txt", ".jsonl") and not path.is_file():
            return f"{self.name}: text file not found; check the path"
        if kind is not None and _holds_more_than(_MOST_FILES, path):
            return (
                f"{self.name}: holds more than {_MOST_FILES} files, too many to search for a dataset; give a"
                " directory that holds only data, or a file"
            )
        return None

    def _dataset(self, fields: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        import datasets

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
            for row in rows:
                lacking = next((field for field in fields if field not in row), None)
                if lacking is not None:
                    raise SmeltError(
                        f"{self.name}: rows have no field {lacking!r}; available: {', '.join(row)}; set field"
                    )
                yield tuple(row[field] for field in fields)
        except SmeltError:
            raise
        except Exception as error:  # the datasets library raises from many others
            raise SmeltError(
                f"{self.name}: is neither a text file nor a dataset that can be loaded ({first_line(error)}); check the name, or"
                f" download it where there is a network (hf download --repo-type dataset {self.name}) and give its directory"
            ) from None


def _holds_more_than(most: int, directory: Path) -> bool:
    found = 0
    for _, folders, files in os.walk(directory):
        found += len(folders) + len(files)
        if found > most:
            return True
    return False


def _read(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    try:
        yield from _jsonl(path, fields) if path.suffix == ".jsonl" else ((text,) for text in _plain(path))
    except OSError as error:
        raise SmeltError(f"{path}: cannot be read ({error.strerror}); check the file") from None


def _plain(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    kept = ""
    cut = -1  # the last place in it where a document ends
    offset = 0
    with path.open("rb") as file:
        while True:
            block = file.read(_PIECE)
            before = len(kept)
            try:
                kept += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise SmeltError(
                    f"{path}: is not UTF-8 text (near byte {offset + error.start}); convert it to UTF-8"
                ) from None
            offset += len(block)
            if not block:
                break
            # In what is new alone: a text without such places would be searched again and again.
            cut = max(cut, kept.rfind("\n\n", max(0, before - 1)))
            if cut > 0 and len(kept) > _PIECE:
                yield kept[:cut]
                kept, cut = kept[cut + 2 :], -1
    yield kept


def _jsonl(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                record = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError:
                raise SmeltError(f"{path}:{number}: is not UTF-8 text; convert the file to UTF-8") from None
            except (ValueError, RecursionError) as error:
                raise SmeltError(f"{path}:{number}: is not JSON ({error}); each line must be one JSON object") from None
            known = record if isinstance(record, dict) else {}
            lacking = next((field for field in fields if field not in known), None)
            if lacking is not None:
                found = ", ".join(known) if isinstance(record, dict) else type(record).__name__
                raise SmeltError(f"{path}:{number}: has no field {lacking!r}; available: {found}; set field")
            values = tuple(known[field] for field in fields)
            if any(isinstance(text, str) and not is_unicode(text) for text in values):
                raise SmeltError(f"{path}:{number}: holds half of a surrogate pair, which is not text; fix that line")
            yield values

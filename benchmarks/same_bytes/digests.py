"""Digests of files, and of their tensors and fields, so that what differs can be named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of the JSON files that Smelt writes: what is different each time, or on each machine.
VARYING = {"machine", "versions", "path", "speed", "memory", "prefill", "decode", "loads", "seconds"}


def digest(data: Any) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def digests(directory: Path, published: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of all files in the directories, and of the files, that ``published`` names."""
    roots = [path for pattern in published for path in sorted(directory.glob(pattern))]
    files = [
        file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*"))) if file.is_file()
    ]
    return {str(file.relative_to(directory)): file_digest(file) for file in files}


def file_digest(file: Path) -> dict[str, Any]:
    """The SHA-256 of a file, and the digests of its parts: of tensors, or of JSON's fields.

    A report's bytes vary with what it says of time and machine, so it has only those of the other fields.
    """
    found: dict[str, Any] = {}
    if file.name != "report.json":
        found["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    if file.suffix == ".safetensors":
        found["parts"] = dict(tensor_digests(file))
    elif file.suffix == ".json" and file.name != "tokenizer.json":  # which has a field for each token
        found["parts"] = field_digests(json.loads(file.read_text()))
    return found


def tensor_digests(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor's name, and its type, shape and SHA-256, from the file as it is."""
    content = memoryview(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, info in json.loads(bytes(content[8:begin])).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            data = hashlib.sha256(content[begin + first : begin + last]).hexdigest()
            yield name, f"{info['dtype']} {info['shape']} {data}"


def field_digests(data: Any) -> dict[str, str]:
    """The digest of each field's values, fields named like ``models[].layers[].error``; without those that vary."""
    values: dict[str, list[Any]] = {}

    def visit(at: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, each in value.items():
                if name not in VARYING:
                    visit(f"{at}.{name}" if at else name, each)
        elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
            for each in value:
                visit(f"{at}[]", each)
            values.setdefault(f"{at}[]", []).append(len(value))
        else:
            values.setdefault(at, []).append(value)

    visit("", data)
    return {name: digest(each) for name, each in values.items()}

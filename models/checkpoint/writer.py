"""Writing a Hugging Face directory: shards, index, configuration, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ...system.storage.files import disk_error, write_text
from ...system.storage.tensor_files import TensorInfo, write_safetensors

SHARD_BYTES = 4_000_000_000
Entry = tuple[str, TensorInfo, Callable[[], Tensor]]

# Files of a model directory other than weights.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
)
# Where transformers keeps the templates that have names, such as those for tools.
_TEMPLATES = "additional_chat_templates"


def write_checkpoint(
    directory: Path,
    source: Path,
    config: dict[str, Any],
    entries: list[Entry],
    *,
    with_code: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model directory, one tensor in memory at a time.

    Args:
        directory: where to write it; it must not exist.
        source: the model directory whose tokenizer and generation settings are copied.
        config: what ``config.json`` will hold.
        entries: name, description and loader of every tensor, in order.
        with_code: whether the model's Python files are copied, because the user trusts them.
        shard_bytes: most bytes of tensors per file.
    """
    try:
        directory.mkdir(parents=True)
        code = [path.name for path in sorted(source.glob("*.py"))] if with_code else []
        for name in (*_COMPANIONS, *code):
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        templates = sorted((source / _TEMPLATES).glob("*.jinja"))
        if templates:
            (directory / _TEMPLATES).mkdir()
        for path in templates:
            shutil.copyfile(path, directory / _TEMPLATES / path.name)
    except OSError as error:
        raise disk_error(error, directory, 0) from None
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
    shards = _shards(entries, shard_bytes)
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard)
        weight_map |= {tensor: name for tensor, _, _ in shard}
    total = sum(info.nbytes for _, info, _ in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(directory / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(entries: list[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry[1].nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry[1].nbytes
    return shards

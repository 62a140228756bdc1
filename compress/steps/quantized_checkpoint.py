"""The checkpoint that a quantize step writes: quantized parts, unchanged tensors, and the configuration of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from compressed_tensors.quantization import QuantizationArgs

from ...models.checkpoint.writer import Entry, write_checkpoint
from ...models.structure.anatomy import is_linear
from ...models.structure.open_model import OpenModel
from ...models.structure.untied_head import untied
from ...quant.blockwise.assignment import Treatment
from ...quant.blockwise.embedding import EMBEDDING
from ...quant.scheme import Scheme
from ...quant.stored.config import quantization_config
from ...quant.stored.dense_weights import CACHE_SCALES
from ...system.storage.tensor_files import SafetensorsFile

# Of several schemes, transformers applies to experts the one whose targets have a pattern that names them.
_EXPERTS = r"re:.*\.experts\.\d+\..*"


def embedding_tables(model: OpenModel) -> dict[str, Scheme]:
    """The scheme of a quantized input embedding, by each of its names."""
    return dict.fromkeys((model.embedding_key.removesuffix(".weight"), model.skeleton.embedding_name), EMBEDDING)


def write_quantized(
    model: OpenModel,
    chosen: Mapping[str, Treatment],
    parts: list[Path],
    target: Path,
    *,
    cache: QuantizationArgs | None,
    tables: dict[str, Scheme],
) -> None:
    """Write a quantized checkpoint.

    Args:
        model: the model with the rounded weights.
        chosen: each quantized linear's treatment.
        parts: the files of their stored tensors; later files take precedence.
        target: the directory to create.
        cache: the scheme of the KV cache; None if unquantized.
        tables: the scheme of the input embedding, by its names; empty if it is not quantized.
    """
    quantized = {model.linears[name].key for name in chosen} | ({model.embedding_key} if tables else set())
    files = [SafetensorsFile(part) for part in parts]
    home = {name: file for file in files for name in file.tensors}
    entries = [
        *_entries(model, quantized, home),
        *(
            (name, file.tensors[name], lambda name=name, file=file: file.load(name))
            for name, file in home.items()
            if name.rpartition(".")[2] in CACHE_SCALES
        ),
    ]
    config = dict(model.directory.config_data())
    if not model.is_tied:
        config = untied(config) if config.get("tie_word_embeddings", True) else config
    labels = {name: list(dict.fromkeys((model.linears[name].key.removesuffix(".weight"), name))) for name in chosen}
    schemes = {label: treatment.scheme for name, treatment in chosen.items() for label in labels[name]}
    experts = next((treatment.scheme for name, treatment in chosen.items() if model.linears[name].is_expert), None)
    if experts is not None:
        schemes[_EXPERTS] = experts
    head = labels.get(model.anatomy.head)
    config["quantization_config"] = quantization_config(schemes, _ignored(model, chosen), cache, tables, head)
    write_checkpoint(target, model.directory.path, config, entries, with_code=model.directory.trust_remote_code)


def _entries(model: OpenModel, quantized: set[str], home: Mapping[str, SafetensorsFile]) -> list[Entry]:
    """The model's tensors in order, each quantized one replaced by its stored tensors."""
    of_module: dict[str, list[str]] = {}
    for name in sorted(home):
        of_module.setdefault(name.rpartition(".")[0], []).append(name)
    entries: list[Entry] = []
    for key in model.weights.names():
        names = of_module[key.removesuffix(".weight")] if key in quantized else [key]
        if key in quantized:  # its bias is a separate key
            names = [name for name in names if name.rpartition(".")[2] != "bias"]
        for name in names:
            if name in home:
                entries.append((name, home[name].tensors[name], lambda name=name: home[name].load(name)))
            else:
                info = model.weights.info(key)
                entries.append((key, info, lambda key=key, info=info: model.weights.load(key).to(info.dtype)))
    return entries


def _ignored(model: OpenModel, chosen: Mapping[str, Treatment]) -> list[str]:
    """Unquantized matrices, by the names that loaders match: checkpoint names, and lm_head's module name.

    Routers are listed too: transformers has a separate class for them, but vLLM makes them linears.
    """
    quantized = {model.linears[name].key for name in chosen}
    inside = model.skeleton.blocks_name + "."
    matrices = {name for name, _ in model.skeleton.model.named_modules() if is_linear(_)}
    left = [
        label.removesuffix(".weight")
        for name, key in model.names.items()
        for label in dict.fromkeys((key, name))  # some loaders match the one, some the other
        if key.endswith(".weight")
        and key not in quantized
        and len(model.weights.info(key).shape) == 2
        and (name.startswith(inside) or name.removesuffix(".weight") in matrices)
    ]
    head = model.anatomy.head
    return [*left, head] if head not in chosen and head not in left else left

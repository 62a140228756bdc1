"""The cost of a choice: exact bytes, and seconds measured with the runtime's kernels on this machine."""

from __future__ import annotations

import math

from ...models.structure.open_model import LinearFacts, OpenModel
from ..scheme import Scheme
from .format_units import Unit

# A header's entry for a tensor, without its name, shape and offsets.
_ENTRY = len('"":{"dtype":"F8_E4M3","shape":[,],"data_offsets":[,]},')
_SUFFIXES = ("_packed", "_scale", "_shape")
_MORE_SUFFIXES = ("", "_scale", "_packed", "_global_scale", "_zero_point")


def bytes_of(facts: LinearFacts, scheme: Scheme | None) -> int:
    """Bytes of a linear's tensors on disk; unquantized if there is no scheme."""
    if scheme is None:
        return facts.numel * facts.dtype.itemsize
    return scheme.stored_bytes(facts.rows, facts.columns, facts.dtype.itemsize)


def unit_bytes(model: OpenModel, unit: Unit, scheme: Scheme | None) -> int:
    """Bytes of a unit's tensors on disk."""
    return sum(bytes_of(model.linears[name], scheme) for name in unit.linears)


def header_bytes(model: OpenModel, names: list[str], scheme: Scheme | None) -> int:
    """An upper bound for the linears' bytes in the headers of the checkpoint's files."""
    digits = len(str(model.weights.nbytes * 2))
    total = 0
    for name in names:
        facts = model.linears[name]
        shape = len(str(facts.rows)) + len(str(facts.columns))
        suffixes = ("",) if scheme is None else _suffixes(scheme)
        total += sum(len(facts.key) + len(suffix) + _ENTRY + shape + 2 * digits for suffix in suffixes)
    return total


def _suffixes(scheme: Scheme) -> tuple[str, ...]:
    """As long as what is added to a weight's name, for each of its tensors."""
    found = _SUFFIXES if scheme.format == "pack-quantized" else _MORE_SUFFIXES
    if not scheme.args.symmetric and "_zero_point" not in found:
        found += ("_zero_point",)
    if scheme.activations is not None and not scheme.activations.dynamic:
        found += ("_scale", "_zero_point")  # of the inputs
    return found


def other_header_bytes(model: OpenModel, linears: list[str]) -> int:
    """An upper bound for everything else in those headers, for files of the size that Smelt writes."""
    digits = len(str(model.weights.nbytes * 2))
    keys = {model.linears[name].key for name in linears}
    entries = [
        len(key) + _ENTRY + 2 * digits + sum(len(str(size)) + 1 for size in model.weights.info(key).shape)
        for key in model.weights.names()
        if key not in keys
    ]
    files = 1 + math.ceil(model.weights.nbytes / 2_000_000_000)
    return sum(entries) + 64 * files

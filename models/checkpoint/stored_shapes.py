"""The shape of each weight of a checkpoint, in any storage format, from the headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...system.errors import SmeltError
from .weights import CheckpointWeights

# The tensors that store a weight, by local name: those of compressed-tensors, and those of GPTQ and AWQ.
PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx")
WORDS = ("qweight", "qzeros", "scales", "g_idx")
METHODS = ("compressed-tensors", "gptq", "awq")  # whose parts these are
_AWQ_CODES = 8  # to a word


class StoredShape(NamedTuple):
    """A weight's shape, with None where headers do not say, and whether it is stored as integers without a scale."""

    shape: tuple[int | None, ...]
    is_bare_integer: bool


def stored_shapes(weights: CheckpointWeights, quantization: Mapping[str, Any] | None) -> dict[str, StoredShape]:
    """The shape of each weight, by the name that it has or would have if it were not quantized.

    Args:
        weights: the checkpoint's tensors.
        quantization: its ``quantization_config``.

    Raises:
        SmeltError: the parts of a weight contradict each other.
    """
    found: dict[str, StoredShape] = {}
    names = weights.names()
    packed = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in ("weight_scale", "qweight")}
    for name in names:
        module, _, kind = name.rpartition(".")
        if module in packed and kind in (*PARTS, *WORDS, "weight"):
            continue
        info = weights.info(name)
        floats = info.dtype.is_floating_point or info.dtype.is_complex
        found[name] = StoredShape(info.shape, not floats)
    for module in packed:
        is_word = weights.has(f"{module}.qweight")
        shape = _of_words(weights, module, quantization or {}) if is_word else restored_shape(weights, module)
        found[f"{module}.weight"] = StoredShape(shape, False)
    return found


def restored_shape(weights: CheckpointWeights, module: str) -> tuple[int, ...]:
    """The shape of a weight that compressed-tensors packed.

    Raises:
        SmeltError: its parts contradict each other.
    """
    if weights.has(f"{module}.weight_shape") and weights.has(f"{module}.weight_packed"):
        said, packed = weights.info(f"{module}.weight_shape"), weights.info(f"{module}.weight_packed")
        if said.shape == (2,) and not said.dtype.is_floating_point and len(packed.shape) == 2:
            rows, columns = (int(size) for size in weights.load(f"{module}.weight_shape").tolist())
            if rows == packed.shape[0] and 0 < columns <= packed.shape[1] * packed.dtype.itemsize * 8:
                return rows, columns
        raise SmeltError(
            f"{weights.directory}: {module}.weight_shape does not fit {module}.weight_packed, which has the shape"
            f" {list(packed.shape)}; compress the model again"
        )
    if weights.has(f"{module}.weight_packed"):  # 4-bit floats, two to a byte
        packed = weights.info(f"{module}.weight_packed")
        if len(packed.shape) == 2:
            return packed.shape[0], 2 * packed.shape[1]
    elif weights.has(f"{module}.weight"):
        return weights.info(f"{module}.weight").shape
    raise SmeltError(f"{weights.directory}: {module}.weight_scale has no matching weight; compress the model again")


def _of_words(
    weights: CheckpointWeights, module: str, quantization: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """The shape of a weight that GPTQ or AWQ packed; GPTQ's columns are known from ``g_idx`` alone."""
    missing = [kind for kind in ("qzeros", "scales") if not weights.has(f"{module}.{kind}")]
    if missing:
        raise SmeltError(f"{weights.directory}: {module} lacks its {missing[0]}; quantize the model again")
    words, scales = weights.info(f"{module}.qweight").shape, weights.info(f"{module}.scales").shape
    if len(words) != 2 or len(scales) != 2:
        raise SmeltError(
            f"{weights.directory}: {module}.qweight or its scales are not a matrix; quantize the model again"
        )
    if str(quantization.get("quant_method")) == "awq":
        return words[1] * _AWQ_CODES, words[0]
    columns = weights.info(f"{module}.g_idx").shape if weights.has(f"{module}.g_idx") else ()
    return words[1], columns[0] if len(columns) == 1 else None

"""Storage formats of weights: plain, compressed-tensors, GPTQ, AWQ. Each reader returns a :class:`Matrix`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from pydantic import ValidationError
from torch import Tensor

from ...quant.activations import ActivationRounding
from ...quant.stored import awq, compressed_tensors, gptq
from ...quant.stored.codes import Codes
from ...quant.stored.config import online_transforms
from ...system.errors import RuntimeProblem
from .layout import Layout, PartLayout, StoredAxis, axis_of
from .matrix import FloatCodes, Matrix


class Tensors(Protocol):
    """A source of tensors."""

    def has(self, name: str) -> bool: ...
    def tensor(self, name: str) -> Tensor: ...


Shape = Callable[[str], tuple[int, ...]]


class WeightReader:
    """Reads the weight of a linear, or of another kind of module, by its name.

    Args:
        tensors: where from.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def reading(self, tensors: Tensors) -> Self:
        """The same from other tensors."""
        found = copy(self)
        found._tensors = tensors
        return found

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        """The whole weight."""
        raise NotImplementedError

    def layout(self, name: str, kind: str, shape: Shape) -> Layout:
        """Where its outputs and inputs are.

        Args:
            name: of the module.
            kind: of the module.
            shape: of a tensor, by name.
        """
        raise NotImplementedError


def reader_of(config: dict[str, Any] | None, tensors: Tensors) -> WeightReader:
    """The reader for a checkpoint's ``quantization_config``."""
    if not config:
        return _Plain(tensors)
    method = str(config.get("quant_method", "")).replace("_", "-")
    if method == "compressed-tensors":
        return _CompressedTensors(config, tensors)
    if method == "gptq":
        return _Gptq(config, tensors)
    if method == "awq":
        return _Awq(config, tensors)
    raise RuntimeProblem(
        f"quantization method {method!r} is not supported; the runtime reads compressed-tensors, gptq, awq and plain weights"
    )


class _Plain(WeightReader):
    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        return Matrix.plain(self._tensors.tensor(f"{name}.weight"))

    def layout(self, name: str, kind: str, shape: Shape) -> Layout:
        rows, columns = shape(f"{name}.weight")
        return Layout(rows, columns, {"weight": PartLayout(StoredAxis(0), StoredAxis(1))})


class _CompressedTensors(WeightReader):
    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        super().__init__(tensors)
        unknown = online_transforms(config)
        if unknown is not None:
            raise RuntimeProblem(f"quantization_config: {unknown}")
        try:
            self._config = QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "version"})
        except ValidationError as error:
            raise RuntimeProblem(
                f"quantization_config is not valid for compressed-tensors ({error.errors()[0]['msg']})"
            ) from None
        for name, scheme in self._config.config_groups.items():
            assert isinstance(scheme, QuantizationScheme)
            if scheme.weights is None and scheme.input_activations is not None:
                raise RuntimeProblem(
                    f"quantization_config: {name} rounds inputs of {', '.join(scheme.targets)} but no weights, which is not"
                    " supported; keys and values may be rounded by a kv_cache_scheme"
                )

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        if not self._tensors.has(f"{name}.weight_scale"):
            return _Plain(self._tensors).matrix(name)
        stored = _parts(self._tensors, name, compressed_tensors.PARTS, compressed_tensors.PARTS)
        scheme = self._scheme(name, kind)
        args = scheme.weights
        assert args is not None
        inputs = self._inputs(name, scheme.input_activations)
        codes = compressed_tensors.unpack(stored, args)
        if codes is not None:
            return _matrix(codes, name, inputs, widens=True)
        form = scheme.format or self._config.format
        values = compressed_tensors.restored_as(stored, scheme, str(getattr(form, "value", form)))
        plain = Matrix.plain(values, inputs, f"{args.type}{args.num_bits}, {args.strategy}")
        return replace(plain, floats=_float_codes(stored, args, values.shape[0], values.shape[1]))

    def layout(self, name: str, kind: str, shape: Shape) -> Layout:
        there = [part for part in compressed_tensors.PARTS if self._tensors.has(f"{name}.{part}")]
        if "weight_scale" not in there:
            return _Plain(self._tensors).layout(name, kind, shape)
        scheme = self._scheme(name, kind)
        args = scheme.weights
        assert args is not None
        by_group = None if scheme.input_activations is None else scheme.input_activations.group_size
        shapes = {part: shape(f"{name}.{part}") for part in there}
        if "weight_shape" in there:
            rows, columns = self._tensors.tensor(f"{name}.weight_shape").tolist()
        else:
            codes = "weight" if "weight" in there else "weight_packed"
            rows, columns = shapes[codes][0], shapes[codes][1] * (1 if codes == "weight" else 2)
        height, width = args.block_structure or (None, None)
        found: dict[str, PartLayout] = {}
        for part, size in shapes.items():
            if part in ("weight_shape", "weight_global_scale", "weight_g_idx") or len(size) != 2:
                continue
            by_row, by_column = axis_of(0, size[0], rows, height), axis_of(1, size[1], columns, width)
            if part == "weight_packed":
                by_column = StoredAxis.packed(1, args.num_bits) if args.type == "int" else StoredAxis(1, 2)
            elif part == "weight_zero_point" and "weight_packed" in there and size[0] < rows:
                by_row = StoredAxis.packed(0, args.num_bits)
            found[part] = PartLayout(by_row, by_column)
        places = self._tensors.tensor(f"{name}.weight_g_idx") if "weight_g_idx" in there else None
        in_order = places is None or int(places.min()) < 0
        return Layout(rows, columns, found, in_order, max(1, by_group or 1))

    def _inputs(self, name: str, args: QuantizationArgs | None) -> ActivationRounding | None:
        """How the linear's inputs are rounded."""
        if args is None:
            return None
        if args.dynamic is False and args.strategy != "tensor":
            raise RuntimeProblem(
                f"{name}: inputs with fixed scales by {args.strategy} are not supported; one scale for all of them is"
            )
        return rounding_of(args, self._tensors, name, "input")

    def _scheme(self, name: str, kind: str) -> QuantizationScheme:
        best: QuantizationScheme | None = None
        for scheme in self._config.config_groups.values():
            assert isinstance(scheme, QuantizationScheme)
            for target in scheme.targets:
                if target == name or (target.startswith("re:") and re.match(target[3:], name)):
                    return scheme
                if target == kind:
                    best = scheme
        if best is None:
            raise RuntimeProblem(f"{name}: is stored quantized, but no group of quantization_config names it")
        return best


def rounding_of(args: QuantizationArgs, tensors: Tensors, module: str, what: str) -> ActivationRounding:
    """How ``input``, ``k`` or ``v`` of a module is rounded.

    Raises:
        RuntimeProblem: a scale or a zero-point is missing.
    """
    kinds = ("scale", "global_scale") if args.symmetric else ("scale", "zero_point")
    names = {f"{what}_{kind}": f"{module}.{what}_{kind}" for kind in kinds}
    stored = {own: tensors.tensor(name) for own, name in names.items() if tensors.has(name)}
    if args.dynamic is False and not args.symmetric and f"{what}_zero_point" not in stored:
        raise RuntimeProblem(f"{module}: its {what}_zero_point is missing; compress the model again")
    try:
        return ActivationRounding.stored_as(args, stored, what)
    except ValueError as error:
        raise RuntimeProblem(f"{module}: {error}; compress the model again") from None


def _float_codes(stored: dict[str, Tensor], args: QuantizationArgs, rows: int, columns: int) -> FloatCodes | None:
    """The bits that kernels multiply; None for unsupported layouts."""
    codes, scale = stored.get("weight_packed", stored.get("weight")), stored["weight_scale"]
    if codes is None or args.type != "float" or codes.dtype not in (torch.float8_e4m3fn, torch.uint8):
        return None
    if codes.dtype == torch.uint8 and (args.num_bits != 4 or codes.shape != (rows, columns // 2)):
        return None
    height, width = args.block_structure or (1, columns)
    if args.strategy == "tensor" or scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(rows, 1).contiguous()
    if scale.dim() != 2 or scale.shape[0] != -(-rows // height) or columns % scale.shape[1] or columns % width:
        return None
    total = stored.get("weight_global_scale")
    factor = None if total is None else (1.0 / total.float().reshape(1)).expand(rows).contiguous()
    return FloatCodes(codes, scale, height, factor)


class _Gptq(WeightReader):
    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        super().__init__(tensors)
        self._bits = int(config["bits"])
        self._group = int(config.get("group_size", -1))
        # GPTQModel's per-layer overrides, by regular expression.
        self._dynamic: dict[str, dict[str, Any]] = config.get("dynamic") or {}
        self._version = 1 if config.get("checkpoint_format", "gptq") == "gptq" else 2
        for bits in (self._bits, *(each["bits"] for each in self._dynamic.values() if "bits" in each)):
            if bits not in gptq.BITS:
                raise RuntimeProblem(f"GPTQ of {bits} bits is not supported; 2, 3, 4 and 8 are")

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        if not self._tensors.has(f"{name}.qweight"):
            return _Plain(self._tensors).matrix(name)
        bits, group = self._settings(name)
        codes = gptq.unpack(_parts(self._tensors, name, gptq.PARTS, ("g_idx",)), bits, self._version)
        if codes.places is None:
            columns = codes.values.shape[1]
            codes = replace(codes, places=torch.arange(columns) // (columns if group <= 0 else group))
        return _matrix(codes, name)

    def layout(self, name: str, kind: str, shape: Shape) -> Layout:
        if not self._tensors.has(f"{name}.qweight"):
            return _Plain(self._tensors).layout(name, kind, shape)
        bits, _ = self._settings(name)
        words, rows = shape(f"{name}.qweight")
        columns, groups = words * 32 // bits, shape(f"{name}.scales")[0]
        by_group = axis_of(0, groups, columns)
        in_order = True
        if self._tensors.has(f"{name}.g_idx"):
            places = self._tensors.tensor(f"{name}.g_idx")
            in_order = columns % groups == 0 and torch.equal(
                places.int(), torch.arange(columns).int() // (columns // groups)
            )
        parts = {
            "qweight": PartLayout(StoredAxis(1), StoredAxis.packed(0, bits)),
            "qzeros": PartLayout(StoredAxis.packed(1, bits), by_group),
            "scales": PartLayout(StoredAxis(1), by_group),
            "g_idx": PartLayout(None, StoredAxis(0)),
        }
        return Layout(rows, columns, parts, in_order)

    def _settings(self, name: str) -> tuple[int, int]:
        for pattern, each in self._dynamic.items():
            if re.match(pattern.removeprefix("+:"), name):
                return int(each.get("bits", self._bits)), int(each.get("group_size", self._group))
        return self._bits, self._group


class _Awq(WeightReader):
    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        super().__init__(tensors)
        bits = int(config.get("bits", config.get("w_bit", 4)))
        if bits != 4 or str(config.get("version", "gemm")).lower() != "gemm":
            raise RuntimeProblem(
                f"AWQ is supported with 4 bits in version gemm, not {bits} bits in {config.get('version')}"
            )

    def matrix(self, name: str, kind: str = "Linear") -> Matrix:
        if not self._tensors.has(f"{name}.qweight"):
            return _Plain(self._tensors).matrix(name)
        return _matrix(awq.unpack(_parts(self._tensors, name, awq.PARTS)), name)

    def layout(self, name: str, kind: str, shape: Shape) -> Layout:
        if not self._tensors.has(f"{name}.qweight"):
            return _Plain(self._tensors).layout(name, kind, shape)
        columns, words = shape(f"{name}.qweight")
        rows, groups = 8 * words, shape(f"{name}.scales")[0]
        by_group = axis_of(0, groups, columns)
        parts = {
            "qweight": PartLayout(StoredAxis(1, 8), StoredAxis(0)),
            "qzeros": PartLayout(StoredAxis(1, 8), by_group),
            "scales": PartLayout(StoredAxis(1), by_group),
        }
        return Layout(rows, columns, parts)


def _parts(tensors: Tensors, name: str, parts: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Tensor]:
    """The stored tensors of a module, by local name."""
    names = {part: f"{name}.{part}" for part in parts}
    return {part: tensors.tensor(full) for part, full in names.items() if part not in optional or tensors.has(full)}


def _matrix(codes: Codes, name: str, inputs: ActivationRounding | None = None, *, widens: bool = False) -> Matrix:
    """A matrix of these codes, with each group's columns together."""
    groups = codes.scale.shape[1] if codes.scale.dim() == 2 else 1
    label = f"int{codes.bits}" if groups == 1 else f"int{codes.bits} g{codes.values.shape[1] // groups}"
    found = Matrix(codes.values, label, codes.bits, codes.scale, codes.zero, inputs, widens=widens)
    return found if codes.places is None else _gathered(found, codes.places, name)


def _gathered(matrix: Matrix, places: Tensor, name: str) -> Matrix:
    """A matrix whose columns belong to the groups in ``places``, with each group's columns together; plain if groups are uneven."""
    assert matrix.scale is not None
    columns, groups, places = matrix.shape[1], matrix.scale.shape[1], places.long()
    if len(places) != columns or int(places.min()) < 0 or int(places.max()) >= groups:
        raise RuntimeProblem(f"{name}: its g_idx must give each of {columns} columns one of {groups} groups")
    if columns % groups == 0:
        ordered = torch.arange(columns) // matrix.group
        if torch.equal(places, ordered):
            return matrix
        order = places.argsort(stable=True)
        if torch.equal(places[order], ordered):
            label = f"{matrix.format}, activation order"
            return replace(matrix, values=matrix.values[:, order].contiguous(), format=label, order=order)
    codes = matrix.values if matrix.zero is None else matrix.values.short() - matrix.zero.short()[:, places]
    values = codes.to(matrix.scale.dtype) * matrix.scale[:, places]
    return Matrix.plain(values, matrix.inputs, f"int{matrix.bits}, uneven groups")

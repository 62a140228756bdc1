"""What a model's cost depends on, from its configuration alone: no weights are read, or even needed."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...system.errors import RuntimeProblem, SmeltError
from ..cache_types import BY_NAME, CacheType

if TYPE_CHECKING:
    from ...models.directory.directory import ModelDirectory
    from ...quant.scheme import Scheme
    from ..decoder.architectures import DecoderSpec

_SCALE_BYTES = 4


@dataclass(frozen=True)
class LinearSize:
    """Linears of one shape and number format.

    Attributes:
        rows, columns: of the weight: outputs and inputs.
        count: how many there are.
        scheme: how it is stored, such as ``W4A16 g128``; the dtype's name if unquantized.
        weight_bits: of a code.
        inputs: what it multiplies: ``16`` bits, ``int8``, ``fp8`` or ``fp4``.
        nbytes: of each, scales included.
        is_float: whether codes are floats.
        experts: how many experts share it out; 1 if every token needs it.
        chosen: of these, how many a token uses.
        group_size: how many inputs share a scale; 0 if all of a row do, or there are no scales.
    """

    rows: int
    columns: int
    count: int
    scheme: str
    weight_bits: int
    inputs: str
    nbytes: int
    is_float: bool = False
    experts: int = 1
    chosen: int = 1
    group_size: int = 0

    @property
    def numel(self) -> int:
        """Of all of them."""
        return self.rows * self.columns * self.count

    def read(self, tokens: int) -> float:
        """The share of them that a step of so many tokens reads: all, or the experts that are chosen by some token."""
        if self.experts == 1:
            return 1.0
        return 1 - (1 - self.chosen / self.experts) ** tokens

    @property
    def used(self) -> float:
        """The share of them that a token is multiplied by."""
        return self.chosen / self.experts


@dataclass(frozen=True)
class ModelSize:
    """A decoder-only model, without its weights.

    Attributes:
        name: for messages.
        layers: its blocks.
        hidden: the width between them.
        attention_width: query heads times their size, over all layers.
        vocabulary: the head's outputs.
        linears: in the blocks.
        head: the output head.
        other_bytes: of embeddings, norms and biases, which no step reads whole; 0 for a tied embedding.
        kv_elements: elements of keys and values of a position, over all layers.
        kv_heads: key-value heads, over all layers.
        kv_cache_dtype: how they are cached, as the engine's ``kv_cache_dtype``.
        itemsize: of the compute dtype.
        max_length: the most positions.
        windows: of layers that do not see all positions: how many they see, and these layers' share of keys and values.
        heads: the numbers of query and of key-value heads that layers have.
    """

    name: str
    layers: int
    hidden: int
    attention_width: int
    vocabulary: int
    linears: tuple[LinearSize, ...]
    head: LinearSize
    other_bytes: int
    kv_elements: int
    kv_heads: int
    kv_cache_dtype: str
    itemsize: int
    max_length: int
    windows: tuple[tuple[int, float], ...] = ()
    heads: tuple[tuple[int, int], ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        return sum(each.nbytes * each.count for each in (*self.linears, self.head)) + self.other_bytes

    @property
    def parameters(self) -> int:
        """Elements of the linears and the head."""
        return sum(each.numel for each in (*self.linears, self.head))

    @property
    def kv_bytes(self) -> float:
        """Memory of a position's keys and values, scales included."""
        return _kv_bytes(self.kv_elements, self.kv_heads, BY_NAME[self.kv_cache_dtype], self.itemsize)

    @property
    def schemes(self) -> list[str]:
        """How its linears are stored, most weights first."""
        counted: Counter[str] = Counter()
        for each in self.linears:
            counted[each.scheme] += each.numel
        return [name for name, _ in counted.most_common()]

    def cache_share(self, devices: int) -> float:
        """How many times the cache of one device all those need that share every layer: as much as the one with most heads, each.

        Raises:
            RuntimeProblem: the heads cannot be divided, as in the engine.
        """
        for queries, shared in self.heads:
            copies = devices // shared
            if copies and (devices % shared or queries // shared % copies):
                raise RuntimeProblem(
                    f"{self.name}'s {queries} query heads and {shared} key-value heads cannot be divided between {devices}"
                    " devices; use fewer"
                )
        return max((devices * -(-shared // devices) / shared for _, shared in self.heads), default=1.0)

    def with_cache(self, kv_cache_dtype: str) -> ModelSize:
        """The same model with another cache."""
        return replace(self, kv_cache_dtype=kv_cache_dtype)


def _kv_bytes(elements: int, heads: int, kind: CacheType, itemsize: int) -> float:
    if kind.dtype is None:
        return elements * itemsize
    # A scale for each head, of keys and of values.
    return elements / kind.codes_per_byte + 2 * heads * _SCALE_BYTES


def model_size(
    directory: ModelDirectory,
    *,
    scheme: Scheme | None = None,
    head: Scheme | None = None,
    kv_cache_dtype: str = "auto",
) -> ModelSize:
    """The sizes of a model, from its ``config.json``.

    Args:
        directory: of a plain model, or of a checkpoint whose ``quantization_config`` says how it is stored.
        scheme: how the blocks' linears are to be stored instead.
        head: the same for the output head; unquantized if None, unless the checkpoint's is quantized.
        kv_cache_dtype: how keys and values are cached.

    Raises:
        SmeltError: the configuration is invalid, or the scheme does not fit its shapes.
        RuntimeProblem: the runtime does not serve this architecture, or the checkpoint is quantized already.
    """
    import torch

    from ...models.structure.anatomy import is_linear
    from ...models.structure.skeleton import Skeleton
    from ..decoder.architectures import spec_of

    if kv_cache_dtype not in BY_NAME:
        raise RuntimeProblem(f"kv_cache_dtype is {kv_cache_dtype!r}; it must be {', '.join(BY_NAME)}")
    stored = directory.config_data().get("quantization_config")
    if stored is not None and scheme is not None:
        raise RuntimeProblem(
            f"{directory.path}: is quantized already; leave the scheme out, or give the original model"
        )
    config: Any = copy.deepcopy(directory.config())
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    spec = spec_of(config)
    named = directory.config_data()
    # transformers takes float32 where a configuration names none; checkpoints of today are in bfloat16.
    dtype = getattr(torch, str(named.get("dtype") or named.get("torch_dtype") or "bfloat16"), torch.bfloat16)
    skeleton = Skeleton.build(config, dtype, trust_remote_code=directory.trust_remote_code)
    schemes = _Schemes(stored, scheme, head, skeleton.head_name)
    experts = spec.experts or 1
    found: Counter[LinearSize] = Counter()
    counted = 0
    for name, module in skeleton.blocks.named_modules():
        if not is_linear(module):
            continue
        rows, columns = _matrix(module, transposed=spec.names.transposed)
        shares = (experts, spec.experts_per_token) if ".experts." in name else (1, 1)
        full = f"{skeleton.blocks_name}.{name}"
        found[_linear(full, rows, columns, schemes.of(full), dtype, *shares)] += 1
        counted += rows * columns
    top: Any = skeleton.model.get_submodule(skeleton.head_name)
    rows, columns = top.weight.shape
    lm_head = _linear(skeleton.head_name, rows, columns, schemes.of(skeleton.head_name), dtype)
    everything = sum(p.numel() for p in skeleton.parameters().values())
    shared = skeleton.tied and lm_head.weight_bits == 8 * dtype.itemsize
    rest = everything - counted - (0 if skeleton.tied and not shared else rows * columns)
    queries = sum((layer.heads or spec.heads) for layer in spec.layers if layer.attends) * spec.head_size
    return ModelSize(
        directory.name,
        len(spec.layers),
        spec.hidden,
        queries,
        spec.vocabulary,
        tuple(replace(each, count=count) for each, count in found.items()),
        lm_head,
        rest * dtype.itemsize,
        2 * sum(spec.cached_heads) * spec.head_size,
        sum(spec.cached_heads),
        kv_cache_dtype,
        dtype.itemsize,
        spec.max_length,
        _windows(spec),
        tuple(
            sorted(
                {
                    (each.heads or spec.heads, each.key_value_heads or spec.key_value_heads)
                    for each in spec.layers
                    if each.attends
                }
            )
        ),
    )


def _windows(spec: DecoderSpec) -> tuple[tuple[int, float], ...]:
    heads: Counter[int] = Counter()
    for layer, cached in zip((each for each in spec.layers if each.attends), spec.cached_heads, strict=True):
        if layer.window is not None:
            heads[layer.window] += cached
    return tuple((window, count / sum(spec.cached_heads)) for window, count in sorted(heads.items()))


class _Schemes:
    """How each linear is stored: as the checkpoint says, or as wanted."""

    def __init__(self, stored: Any, scheme: Scheme | None, head: Scheme | None, head_name: str) -> None:
        self._wanted = scheme
        self._head = head
        self._head_name = head_name
        self._stored = None
        self._ignored: Iterable[str] = ()
        if stored is None:
            return
        method = stored.get("quant_method", "compressed-tensors")
        if method != "compressed-tensors":
            raise RuntimeProblem(
                f"quant_method is {method!r}; costs are known of compressed-tensors' checkpoints only, so give the original"
                " model and a scheme"
            )
        from pydantic import ValidationError

        from ...quant.stored.config import StoredSchemes

        try:
            self._stored = StoredSchemes(stored)
        except ValidationError as error:
            raise SmeltError(f"quantization_config is not valid ({error.errors()[0]['msg']})") from None
        self._ignored = frozenset(stored.get("ignore") or ())

    def of(self, name: str) -> Scheme | None:
        """A linear's scheme; None if it is unquantized."""
        if self._stored is None:
            return self._head if name == self._head_name else self._wanted
        if self._is_ignored(name):
            return None
        if name == self._head_name and not self._stored.names(name):
            return None
        return self._stored.of(name)

    def _is_ignored(self, name: str) -> bool:
        return any(each == name or (each.startswith("re:") and re.match(each[3:], name)) for each in self._ignored)


def _matrix(module: Any, *, transposed: bool) -> tuple[int, int]:
    rows, columns = module.weight.shape
    return (columns, rows) if transposed else (rows, columns)


def _linear(
    name: str, rows: int, columns: int, scheme: Scheme | None, dtype: Any, experts: int = 1, chosen: int = 1
) -> LinearSize:
    if scheme is None:
        label = str(dtype).removeprefix("torch.")
        nbytes = rows * columns * dtype.itemsize
        return LinearSize(rows, columns, 1, label, 8 * dtype.itemsize, "16", nbytes, True, experts, chosen)
    problem = scheme.shape_problem(rows, columns)
    if problem:
        raise SmeltError(f"{name}: {problem}")
    acts, bits = scheme.activations, scheme.args.num_bits
    inputs = "16" if acts is None or acts.num_bits == 16 else f"{_kind(acts)}{acts.num_bits}"
    nbytes = scheme.stored_bytes(rows, columns)
    is_float = _kind(scheme.args) == "fp"
    group = scheme.args.group_size or 0
    return LinearSize(rows, columns, 1, scheme.label, bits, inputs, nbytes, is_float, experts, chosen, max(0, group))


def _kind(args: Any) -> str:
    return "fp" if args.type == "float" else "int"

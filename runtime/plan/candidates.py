"""What can be planned for a model: formats of the linears and the output head, types of the cache, and blocks dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...system.errors import RuntimeProblem, nearest_name
from ..cache_types import names_for, type_that_holds
from ..costs.model_size import LinearSize, ModelSize, model_size
from .losses import CACHE_LOSS, SCHEME_LOSS, UNQUANTIZED, block_loss

if TYPE_CHECKING:
    from ...models.directory.directory import ModelDirectory
    from ...quant.scheme import Scheme

DROPPED_SHARES = (0.0, 0.1, 0.25)
_GROUPS = (128, 64, 32, 16)
# The compiled CPU kernels keep 2- and 3-bit codes in 4 bits.
_LEAST_CPU_BITS = 4


@dataclass(frozen=True)
class PlanCandidate:
    """One way to compress a model.

    Attributes:
        scheme: of the blocks' linears; None if they stay as they are.
        head: of the output head; None if it stays as it is.
        kv_cache_dtype: how keys and values are cached, as the engine's ``kv_cache_dtype``.
        dropped: blocks that are removed.
        size: what the engine keeps in memory and multiplies.
        loss: what the choices lost on a small model, summed: an order, and no prediction.
        notes: what one should know.
    """

    scheme: Scheme | None
    head: Scheme | None
    kv_cache_dtype: str
    dropped: int
    size: ModelSize
    loss: float
    notes: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """The format of the weights alone."""
        stored = " + ".join(self.size.schemes) if self.scheme is None else self.scheme.label
        return f"{stored}{', head too' if self.head is not None else ''}"

    @property
    def label(self) -> str:
        """Its choices in words."""
        cache = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} cache"
        blocks = f", {self.dropped} block{'s' * (self.dropped > 1)} dropped" if self.dropped else ""
        return f"{self.form}{cache}{blocks}"


def find_candidates(
    directory: ModelDirectory, *, on_cpu: bool, constants: Sequence[str], schemes: Sequence[str] = ()
) -> list[PlanCandidate]:
    """All candidates whose shapes fit, the least compressed first.

    Args:
        directory: of a plain model, or of a quantized checkpoint, of which only the cache varies.
        on_cpu: whether the compiled CPU kernels serve it.
        constants: of the device, as far as known; empty if it was calibrated.
        schemes: only these, by name; all if empty.

    Raises:
        SmeltError: the model cannot be sized, or no candidate is left.
    """
    chosen = _chosen(schemes)
    plain = model_size(directory)
    stored = directory.config_data().get("quantization_config")
    if stored is not None:
        if schemes:
            raise RuntimeProblem(
                f"{directory.path}: is quantized already; leave --scheme out, or give the original model"
            )
        formats: list[tuple[Scheme | None, Scheme | None, ModelSize]] = [(None, None, plain)]
        shares: tuple[float, ...] = (0.0,)
        caches = _stored_caches(stored.get("kv_cache_scheme"), on_cpu)
    else:
        formats, shares, caches = _formats(directory, plain, chosen), DROPPED_SHARES, _caches(on_cpu)
    if not formats:
        raise RuntimeProblem(f"{directory.path}: no scheme fits its shapes; leave --scheme out")
    counts = sorted({round(share * plain.layers) for share in shares if round(share * plain.layers) < plain.layers})
    found = []
    for scheme, head, size in formats:
        served, notes = _as_served(size, on_cpu=on_cpu, constants=constants)
        loss = SCHEME_LOSS[UNQUANTIZED if scheme is None else scheme.name].of(head=head is not None)
        for dropped in counts:
            short = without_blocks(served, dropped)
            for kv_cache_dtype in caches:
                total = loss + CACHE_LOSS[kv_cache_dtype] + block_loss(dropped / plain.layers)
                found.append(
                    PlanCandidate(
                        scheme, head, kv_cache_dtype, dropped, short.with_cache(kv_cache_dtype), total, tuple(notes)
                    )
                )
    return sorted(found, key=lambda each: each.loss)


def without_blocks(size: ModelSize, dropped: int) -> ModelSize:
    """A model's size without some of its blocks, which are taken to be average ones.

    Norms of the removed blocks are still counted, below a thousandth of a large model.
    """
    if not dropped:
        return size
    share = (size.layers - dropped) / size.layers
    return replace(
        size,
        layers=size.layers - dropped,
        attention_width=round(size.attention_width * share),
        linears=tuple(replace(each, count=max(1, round(each.count * share))) for each in size.linears),
        kv_elements=round(size.kv_elements * share),
        kv_heads=round(size.kv_heads * share),
    )


def _chosen(names: Sequence[str]) -> list[str]:
    known = {name.lower(): name for name in SCHEME_LOSS}
    for name in names:
        if name.lower() not in known:
            raise RuntimeProblem(
                f"--scheme: {name!r} is not planned; known: {', '.join(SCHEME_LOSS)}{nearest_name(name, list(SCHEME_LOSS))}"
            )
    wanted = {known[name.lower()] for name in names}
    return [name for name in SCHEME_LOSS if name in wanted or not names]


def _formats(
    directory: ModelDirectory, plain: ModelSize, names: list[str]
) -> list[tuple[Scheme | None, Scheme | None, ModelSize]]:
    """Every scheme that fits the linears, and with the head where it fits that, too."""
    found: list[tuple[Scheme | None, Scheme | None, ModelSize]] = []
    for name in names:
        if name == UNQUANTIZED:
            found.append((None, None, plain))
            continue
        scheme = _fitting(name, plain.linears)
        if scheme is None:
            continue
        found.append((scheme, None, model_size(directory, scheme=scheme)))
        if scheme.shape_problem(plain.head.rows, plain.head.columns) is None:
            found.append((scheme, scheme, model_size(directory, scheme=scheme, head=scheme)))
    return found


def _fitting(name: str, linears: Sequence[LinearSize]) -> Scheme | None:
    """A scheme in its own groups, or the largest that divide all linears; None if it cannot be."""
    from ...quant.scheme import resolve

    scheme = resolve(name)
    options = [scheme]
    if scheme.accepts_group_size:
        options = [resolve(name, group) for group in (*_GROUPS, -1)]
    return next((each for each in options if not any(each.shape_problem(x.rows, x.columns) for x in linears)), None)


def _caches(on_cpu: bool) -> list[str]:
    return [name for name in CACHE_LOSS if name in names_for("native" if on_cpu else "gpu")]


def _stored_caches(scheme: dict[str, object] | None, on_cpu: bool) -> list[str]:
    """Those that a checkpoint leaves open: all, or the one that its own codes are kept in."""
    if not scheme:
        return _caches(on_cpu)
    return [type_that_holds("float" if scheme.get("type") == "float" else "int").name]


def _as_served(size: ModelSize, *, on_cpu: bool, constants: Sequence[str]) -> tuple[ModelSize, list[str]]:
    """What the engine makes of stored weights, and sentences on what a format does not gain."""
    notes: list[str] = []
    parts = [*size.linears, size.head]
    if on_cpu:
        if any(each.is_float and each.weight_bits < 16 for each in parts):
            notes.append("dequantized to bfloat16 on a CPU: only the disk gains")
        if any(not each.is_float and each.weight_bits < _LEAST_CPU_BITS for each in parts):
            notes.append("kept in 4 bits on a CPU")
        parts = [_on_cpu(each) for each in parts]
    elif constants:
        for inputs in sorted({each.inputs for each in parts} - {"16"}):
            if f"flops_{inputs}" not in constants:
                notes.append(f"no {inputs} products known there: 16-bit products, only fewer bytes are gained")
    return replace(size, linears=tuple(parts[:-1]), head=parts[-1]), notes


def _on_cpu(linear: LinearSize) -> LinearSize:
    """As the compiled CPU kernels keep it: floats are dequantized, and codes have at least 4 bits."""
    numel = linear.rows * linear.columns
    if linear.is_float and linear.weight_bits < 16:
        return replace(linear, weight_bits=16, inputs="16", nbytes=2 * numel)
    if not linear.is_float and linear.weight_bits < _LEAST_CPU_BITS:
        more = numel * (_LEAST_CPU_BITS - linear.weight_bits) // 8
        return replace(linear, weight_bits=_LEAST_CPU_BITS, nbytes=linear.nbytes + more)
    return linear

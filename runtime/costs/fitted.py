"""A step's time from prices that were fitted to measured steps of one device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from .model_size import LinearSize, ModelSize
from .work import StepWork

# Numbers of rows at which a weight's time is priced; between them it is interpolated.
KNOTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
_PACKED_BITS = 4
# Decodes of so many sequences may be one call for all layers on a CPU; more, and prompts, are a call for each operation.
_FEW_ROWS = 8

# Amounts that every calibration prices; those of kinds of linears come besides.
ALWAYS = (
    "few decodes step", "decodes step", "prompt step", "chunk", "prompt chunk in a layer", "sampled", "sampled logit",
    "token in a layer", "hidden state", "cached byte of decodes", "cached byte of prompts", "pair of prompts", "pause",
)  # fmt: skip


def kernel_of(linear: LinearSize) -> str:
    """The kind of kernel that computes a linear: its weights' bits, as they are kept, and its inputs.

    Fewer than 4 bits are kept in 4; floats of 8 and 4 bits have kernels of their own or are dequantized, so they are apart.
    """
    if linear.weight_bits >= 16:
        return "w16a16"
    return f"{'f' if linear.is_float else 'w'}{max(_PACKED_BITS, linear.weight_bits)}a{linear.inputs}"


def nearest_kernel(kernel: str, known: Mapping[str, object] | set[str]) -> str:
    """The calibrated kernel that is most like one that is not: with the same inputs if there is one, and the closest bits."""

    def distance(other: str) -> tuple[bool, int, str]:
        bits, inputs = other[1:].split("a", 1)
        mine, wanted = kernel[1:].split("a", 1)
        return inputs != wanted, abs(int(bits) - int(mine)), other

    return kernel if kernel in known else min(known, key=distance)


def linear_features(kernel: str, elements: float, rows: int) -> dict[str, float]:
    """A product of so many rows with weights of so many elements, as amounts at the two knots around ``rows``."""
    if rows <= 0:
        return {}
    if rows >= KNOTS[-1]:
        return {f"{kernel}@{KNOTS[-1]}": elements * rows / KNOTS[-1]}
    i = bisect_right(KNOTS, rows) - 1
    low, high = KNOTS[i], KNOTS[i + 1]
    share = (rows - low) / (high - low)
    found = {f"{kernel}@{low}": elements * (1 - share)}
    if share:
        found[f"{kernel}@{high}"] = elements * share
    return found


def features(size: ModelSize, work: StepWork, cached_bytes: int = 0) -> dict[str, float]:
    """The amounts of a step that have prices.

    Args:
        size: of the model.
        work: what the step does.
        cached_bytes: of weights, that stay in the processor's caches from step to step.
    """
    found: dict[str, float] = {}
    kind, work = _kind(work), work.within(size.windows)
    found[f"{kind} step"] = 1.0
    found[f"{main_kernel(size)} layer, {kind}"] = size.layers
    found["chunk"] = work.chunks
    found["prompt chunk in a layer"] = work.prompts * size.layers
    found["sampled"] = work.sequences
    found["sampled logit"] = work.sequences * size.vocabulary
    found["token in a layer"] = work.tokens * size.layers
    found["hidden state"] = work.tokens * size.hidden * size.layers
    found["cached byte of decodes"] = work.decode_cached * size.kv_bytes
    found["cached byte of prompts"] = (work.cached - work.decode_cached) * size.kv_bytes
    found["pair of prompts"] = work.prompt_pairs * size.attention_width
    found["pause"] = float(work.after_pause)
    for name, amount in linear_features("streamed", streamed_bytes(size, cached_bytes), work.tokens).items():
        found[name] = amount
    parts = [(each, each.numel * each.read(work.tokens), work.tokens) for each in size.linears]
    for each, elements, rows in [*parts, (size.head, float(size.head.numel), work.sequences)]:
        for kernel, count in _kernel_amounts(kernel_of(each), each, elements):
            for name, amount in linear_features(kernel, count, rows).items():
                found[name] = found.get(name, 0.0) + amount
    return found


def _kernel_amounts(kernel: str, linear: LinearSize, elements: float) -> list[tuple[str, float]]:
    """What a kernel reads of some elements: these, and the groups that share a scale."""
    if not linear.group_size:
        return [(kernel, elements)]
    return [(kernel, elements), (f"{kernel} group", elements / linear.group_size)]


def main_kernel(size: ModelSize) -> str:
    """The kind of kernel that computes most of a model's weights."""
    return kernel_of(max(size.linears, key=lambda each: each.numel))


def streamed_bytes(size: ModelSize, cached_bytes: int) -> float:
    """Bytes of weights that a step reads from memory, beyond what the processor's caches keep."""
    return max(0.0, size.weight_bytes - cached_bytes)


def _kind(work: StepWork) -> str:
    if work.prompts:
        return "prompt"
    return "few decodes" if work.chunks <= _FEW_ROWS else "decodes"


class FittedCost:
    """A model's step times at a device's prices.

    Args:
        size: of the model.
        prices: seconds of one of each amount of :func:`features`.
        cached_bytes: as for :func:`features`.
    """

    def __init__(self, size: ModelSize, prices: Mapping[str, float], cached_bytes: int = 0) -> None:
        self.size = size
        price = prices.get
        layers = size.layers
        known = {name.split("@")[0] for name in prices if "@" in name and " group" not in name} - {"streamed"}
        self._streamed = streamed_bytes(size, cached_bytes)
        main = nearest_kernel(main_kernel(size), known)
        self._step = {
            kind: price(f"{kind} step", 0.0) + price(f"{main} layer, {kind}", 0.0) * layers
            for kind in ("few decodes", "decodes", "prompt")
        }
        self._chunk = price("chunk", 0.0)
        self._prompt = price("prompt chunk in a layer", 0.0) * layers
        self._sampled = price("sampled", 0.0) + price("sampled logit", 0.0) * size.vocabulary
        self._token = price("token in a layer", 0.0) * layers + price("hidden state", 0.0) * size.hidden * layers
        self._decode_cached = price("cached byte of decodes", 0.0) * size.kv_bytes
        self._prompt_cached = price("cached byte of prompts", 0.0) * size.kv_bytes
        self._pause = price("pause", 0.0)
        self._pair = price("pair of prompts", 0.0) * size.attention_width
        self._linears: dict[int, float] = {}
        self._parts = [(nearest_kernel(kernel_of(each), known), each) for each in size.linears]
        self._prices = prices
        self._head = (nearest_kernel(kernel_of(size.head), known), size.head)
        self._heads: dict[int, float] = {}

    def seconds(self, work: StepWork) -> float:
        """The time of a step, the host's share included, without swapping."""
        linears = self._linears.get(work.tokens)
        if linears is None:
            linears = self._linears[work.tokens] = self._priced("streamed", self._streamed, work.tokens) + sum(
                self._linear(kernel, each, each.numel * each.read(work.tokens), work.tokens)
                for kernel, each in self._parts
            )
        head = self._heads.get(work.sequences)
        if head is None:
            kernel, each = self._head
            head = self._heads[work.sequences] = self._linear(kernel, each, each.numel, work.sequences)
        work = work.within(self.size.windows)
        decoded = work.decode_cached
        return (
            self._step[_kind(work)]
            + self._chunk * work.chunks
            + self._prompt * work.prompts
            + self._sampled * work.sequences
            + self._token * work.tokens
            + self._decode_cached * decoded
            + self._prompt_cached * (work.cached - decoded)
            + self._pair * work.prompt_pairs
            + self._pause * work.after_pause
            + linears
            + head
        )

    def _linear(self, kernel: str, linear: LinearSize, elements: float, rows: int) -> float:
        return sum(self._priced(name, amount, rows) for name, amount in _kernel_amounts(kernel, linear, elements))

    def _priced(self, kernel: str, elements: float, rows: int) -> float:
        amounts = linear_features(kernel, elements, rows)
        return sum(amount * self._prices.get(name, 0.0) for name, amount in amounts.items())

"""What a launch has to do: bytes from memory and from the second-level cache, iterations, operations, reads one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smelt.runtime.kernels.base.launch import Launch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """One launch's.

    Attributes:
        label: for people.
        programs: that have something to do.
        memory: bytes that come from memory: weights, keys and values; what a step has just written is in the second-level cache.
        l2: bytes that all programs ask the second-level cache for, those included.
        in_flight: bytes that a program has on their way from memory.
        trips: iterations of the main loop.
        partial: iterations of the loop for what does not fill a tile.
        scans, reduces: iterations of loops before and behind.
        reads, l2_reads: reads that wait for the one before, from memory and from the second-level cache, before the main loop.
        shares: programs that leave a sum for the last of them.
        sums: bytes of those, written and read.
        last_sums: of those, what one program reads at the end.
        operations: of tensor cores.
        bits: of what those multiply.
        extra: instructions that are assumed besides those of the code.
    """

    label: str
    programs: int
    memory: int
    l2: int
    in_flight: int
    trips: int = 0
    partial: int = 0
    scans: int = 0
    reduces: int = 0
    reads: int = 1
    l2_reads: int = 0
    shares: int = 1
    sums: int = 0
    last_sums: int = 0
    operations: float = 0.0
    bits: int = 16
    extra: int = 0


@dataclass(frozen=True)
class Lengths:
    """What a step's tensors do not say: how many sequences it has, and how many positions each."""

    sequences: int
    context: int


def name_of(launch: Launch) -> str:
    """Of a kernel, as it is listed everywhere."""
    return getattr(launch.function, "__name__", "kernel").strip("_")


def work_of(launch: Launch, lengths: Lengths) -> Work:
    """What a launch has to do; of a kernel that is not known here, only its tensors."""
    return _KNOWN.get(name_of(launch), _plain)(launch, lengths)


def _linear(launch: Launch, lengths: Lengths) -> Work:
    arguments, constants = launch.arguments, launch.constants
    name = name_of(launch)
    rows, outputs, columns = (_number(arguments[key]) for key in "MNK")
    weight = _bytes(arguments, ("codes", "more", "scales", "row_scales", "weight", "block_scales", "bias"))
    step = constants.get("STEP", 128) * constants.get("SLICES", 1)
    iterations = -(-columns // step)
    tiles, split = launch.grid
    across = tiles // _number(arguments["row_tiles"])
    trips = -(-iterations // split)
    programs = tiles * -(-iterations // trips)  # behind the last column a program has nothing to do
    valid, itemsize = min(rows, constants["BM"]), _tensor(arguments["x"]).element_size()
    fused = bool(constants.get("FUSED"))
    inputs = valid * itemsize * (trips * step + (columns if fused else 0))
    each = weight // (across * iterations)
    part = constants["BN"] * valid * 4
    gate = "" if constants["GATE"] == "none" else f" {constants['GATE']}"
    eight = name == "linear_bytes"
    return Work(
        label=f"{name} {rows}x{columns} by {outputs}{gate}",
        programs=programs,
        memory=weight,
        l2=programs * (each * trips + inputs),
        in_flight=max(1, constants["STAGES"] - 1) * each,
        trips=trips,
        scans=iterations if fused else 0,
        # The compiler unrolls the sum of parts by four.
        reduces=-(-split // 4) if split > 1 else 0,
        # The scan's inputs, or the rounded inputs' scales, come first.
        l2_reads=1 if eight else 0,
        shares=split,
        sums=2 * split * tiles * part if split > 1 else 0,
        last_sums=split * part if split > 1 else 0,
        operations=2.0 * programs * trips * step * constants["BN"] * constants["BM"],
        bits=8 if eight else 16,
    )


def _attend_tokens(launch: Launch, lengths: Lengths) -> Work:
    arguments, constants = launch.arguments, launch.constants
    keys, shared, width = _tensor(arguments["keys"]), constants["SHARED"], constants["BN"]
    position = 2 * keys.shape[-1] * keys.element_size() + (8 if arguments["key_scales"] is not None else 0)
    window = constants["WINDOW"] or lengths.context
    seen = min(window, lengths.context)
    tiles = -(-seen // width)
    # A short sequence has eight parts, too (_plan of attend_tokens.py).
    size = max(-(-tiles * lengths.sequences // _number(arguments["programs"])), min(-(-tiles // 8), constants["LEAST"]))
    parts = -(-tiles // size)
    programs = shared * parts * lengths.sequences
    memory = lengths.sequences * shared * seen * position
    part = constants["GROUP"] * (constants["DP"] + 2) * 4
    partial = int(seen % width > 0)
    return Work(
        label=f"attend_tokens {lengths.sequences}x{lengths.context} {constants['KIND']}",
        programs=programs,
        memory=memory,
        l2=memory,
        # A block's number is read before what it leads to, which takes every other stage.
        in_flight=max(1, (constants["STAGES"] - 1) // 2) * width * position,
        trips=min(size, tiles) - partial,
        partial=partial,
        reduces=-(-parts // 4) if parts > 1 else 0,
        # Lengths; then the row and the table; then cosines and sines.
        l2_reads=3,
        shares=parts,
        sums=2 * programs * part if parts > 1 else 0,
        last_sums=parts * part if parts > 1 else 0,
        operations=4.0 * constants["ROWS"] * constants["DP"] * shared * lengths.sequences * tiles * width,
    )


def _logit_statistics(launch: Launch, lengths: Lengths) -> Work:
    rows, chunks = launch.grid
    logits = _tensor(launch.arguments["logits"])
    moved = rows * _number(launch.arguments["V"]) * logits.element_size()
    # The slot; then what it asks for, which nobody has read since the step before: how many edits, penalties, temperature.
    return Work(f"logit_statistics {rows}", rows * chunks, 0, moved, moved // (rows * chunks), reads=3, l2_reads=1)


def _choose_tokens(launch: Launch, lengths: Lengths) -> Work:
    moved = _bytes(launch.arguments, ("partials", "winners"))
    # Its temperature from memory; partial results, the best one's token, and its logit from the second-level cache.
    return Work(f"choose_tokens {launch.grid[0]}", launch.grid[0], 0, moved, moved // launch.grid[0], l2_reads=3)


def _plain(launch: Launch, lengths: Lengths) -> Work:
    tensors = {id(value): value for value in launch.arguments.values() if isinstance(value, Tensor)}
    moved = sum(value.nbytes for value in tensors.values())
    programs = 1
    for size in launch.grid:
        programs *= size
    shape = next(("x".join(map(str, value.shape)) for value in tensors.values()), "")
    return Work(f"{name_of(launch)} {shape}", programs, 0, moved, max(1, moved // programs))


def of_torch(name: str, moved: int) -> Work:
    """One of torch's own operators."""
    return Work(name, max(1, -(-moved // 16384)), 0, moved, 16384, l2_reads=1, extra=_TORCH)


_TORCH = 200  # about what one of its elementwise kernels runs from its first to its last instruction
_KNOWN: dict[str, Callable[[Launch, Lengths], Work]] = {
    "linear_codes": _linear,
    "linear_dense": _linear,
    "linear_bytes": _linear,
    "attend_tokens": _attend_tokens,
    "logit_statistics": _logit_statistics,
    "choose_tokens": _choose_tokens,
}


def _bytes(arguments: dict[str, Any], names: tuple[str, ...]) -> int:
    return sum(value.nbytes for name in names if isinstance(value := arguments.get(name), Tensor))


def _number(value: Tensor | int | None) -> int:
    assert isinstance(value, int)
    return value


def _tensor(value: Tensor | int | None) -> Tensor:
    assert isinstance(value, Tensor)
    return value

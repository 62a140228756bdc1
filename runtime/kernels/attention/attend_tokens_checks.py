"""What checks :mod:`.attend_tokens`, and what is compiled of it ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...cache_types import BY_KIND, QUANTIZED_KINDS, SELECTABLE_KINDS
from ...heads import Heads
from ..base.kernel import Build, Case, Kernel, PreparedCase, poisoned
from ..base.launch import Launch
from ..base.targets import Target, splitting, target_of
from ..base.workspace import Workspace
from ..rows.cached import LayerCache, restored
from ..rows.rotate_and_store import RotaryTables, StoreCase, rotate_and_store
from ..tiles.attention_tiles import TokenTile, token_tile
from .attend_tokens import Storing, attend_tokens, launches
from .case import AttentionCase, attention_cases, reference
from .flash import Runs


def _cases() -> list[AttentionCase]:
    def with_parts(programs: int, splits: bool, least: int) -> Callable[..., None]:
        def compute(case: AttentionCase, queries: Tensor, cache: LayerCache, runs: Runs, out: Tensor) -> None:
            tile = TokenTile(16, least, 4, 1, 1)
            target = replace(target_of(queries.device), units=programs * case.heads.shared)
            if not splits:
                target = replace(target, splits=False)
            attend_tokens(queries, case.heads, cache, runs, out, tile=tile, target=target)

        return compute

    found = []
    for i, case in enumerate(attention_cases(singles=True)):
        programs, splits = (1, 3, 9)[i % 3], i % 5 != 4
        note = f", {programs} programs{'' if splits else ', merged apart'}"
        compute = with_parts(programs, splits, least=1 + i % 2)
        found.append(
            replace(case, note=note).computed_by(lambda *inputs, case=case, compute=compute: compute(case, *inputs))
        )
    return found


def _alike(one: LayerCache, other: LayerCache) -> bool:
    """Bit for bit; but what is rotated by a product may be added up in another order, and a few codes be neighbours."""
    if not BY_KIND[one.kind].packed:
        pairs = zip(one.parts(), other.parts(), strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    for a, b, scales in (
        (one.keys, other.keys, (one.key_scales, other.key_scales)),
        (one.values, other.values, (one.value_scales, other.value_scales)),
    ):
        assert scales[0] is not None
        apart = restored(a, scales[0], one.kind) - restored(b, scales[1], one.kind)
        steps = (apart / scales[0].double().unsqueeze(-1)).abs()
        if float(steps.max()) > 1.5 or float((steps > 0.5).double().mean()) > 0.002:
            return False
    return True


def _stored_case(case: AttentionCase, norm: str, half: int) -> Case:
    """The fused store must give the same outputs and the same cache as a separate one, as :func:`_alike` has it."""
    shape = StoreCase(case.heads, case.kind, case.dtype, norm, half=half, tokens=len(case.runs))

    def prepare(device: torch.device, draw: torch.Generator) -> PreparedCase:
        heads = case.heads
        cache, tables = case.random_cache(device, draw)
        rows = torch.arange(len(case.runs), dtype=torch.int32, device=device)
        stops = torch.tensor([stop for _, stop in case.runs], dtype=torch.int32, device=device)
        runs = Runs(rows, torch.ones_like(rows), stops, tables)
        width = (heads.queries + 2 * heads.shared) * heads.size
        x = torch.randn(len(rows), width, generator=draw, device=draw.device).to(device, case.dtype)
        norms, rotary = shape.norms(draw, device), shape.rotary(draw, device)
        before, after = cache.copied(), cache.copied()
        last = (stops - 1).long()
        blocks = tables[rows.long(), last // cache.block]
        slots = (blocks * cache.block + last % cache.block).int()
        queries = rotate_and_store(x, heads, before, slots, norms, rotary)
        expected = reference(queries, heads, before, runs)
        target = replace(target_of(device), units=3 * heads.shared)
        if not target.splits:
            raise ValueError("this device stores keys in a separate launch")

        def compute() -> Tensor:
            out = poisoned(len(rows), heads.queries * heads.size, case.dtype, device)
            tile = TokenTile(16, 1, 4, 1, 1)
            attend_tokens(x, heads, after, runs, out, storing_too=Storing(norms, rotary), tile=tile, target=target)
            return out if _alike(before, after) else out * float("nan")

        return PreparedCase(compute, expected, 0)

    name = f"{case.name}, norm {norm}, {2 * half} rotated, stored on the way"
    targets = splitting(case.targets)
    return Case(name, prepare, case.case().tolerance, targets=targets)


def _stored_cases() -> list[Case]:
    plain = attention_cases(singles=True)[0]
    by_kind = {kind: replace(plain, kind=kind) for kind in SELECTABLE_KINDS}
    return [
        _stored_case(by_kind["plain"], "head", 32),
        _stored_case(replace(plain, heads=replace(plain.heads, size=96, window=20)), "none", 24),
        _stored_case(replace(plain, block=48), "whole", 0),
        *(_stored_case(case, "none", 32) for kind, case in by_kind.items() if kind != "plain"),
    ]


def _build(
    heads: Heads,
    kind: str,
    block: int,
    *,
    stores: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    rare: bool = False,
) -> Build:
    note = ", stored too" if stores else ""
    case = AttentionCase(heads, kind, dtype, block, ((1, 512),) * 4, note)

    def on_meta(target: Target) -> Launch:
        queries, cache, runs, out = case.on_meta()
        tile = token_tile(target, heads, dtype, kind)
        storing_too = None
        if stores:
            half = heads.size // 2
            cosines, sines = (torch.empty(8, half, dtype=dtype, device="meta") for _ in range(2))
            storing_too = Storing(None, RotaryTables(cosines, sines, torch.empty(4, dtype=torch.int32, device="meta")))
            queries = torch.empty(4, (heads.queries + 2 * heads.shared) * heads.size, dtype=dtype, device="meta")
        space = Workspace(torch.device("meta"))
        return launches(queries, heads, cache, runs, out, tile, target, space, storing_too)[0]

    halves = dtype != torch.float32
    # On AMD's GPUs keys are stored in a separate launch: a barrier does not make them visible.
    targets = case.targets
    if stores:
        targets = splitting(targets)
    return Build(
        case.name,
        on_meta,
        matrix=halves,
        streamed=("keys",) if halves and kind == "plain" else (),
        targets=targets,
        rare=rare,
        overlapped=halves,
    )


def _builds() -> list[Build]:
    def heads(size: int, queries: int = 32, **changes: object) -> Heads:
        return Heads(queries, 8, size, size**-0.5, **{"window": None, "cap": None, **changes})  # pyright: ignore[reportArgumentType]

    found = [_build(heads(size), "plain", 16, rare=size != 128) for size in (64, 80, 96, 128, 256)]
    found += [_build(heads(128), kind, 16, rare=not BY_KIND[kind].packed) for kind in QUANTIZED_KINDS]
    found += [_build(heads(128), kind, 16, stores=True, rare=True) for kind in SELECTABLE_KINDS]
    found += [_build(heads(256, 16), kind, 16, rare=True) for kind in QUANTIZED_KINDS]
    found += [
        _build(heads(128), "plain", 256, rare=True),
        _build(heads(128, window=4096), "plain", 16, rare=True),
        _build(Heads(64, 1, 128, 128**-0.5, None, None), "plain", 16, rare=True),
        _build(Heads(71, 1, 64, 64**-0.5, None, None), "int8", 16, rare=True),
        _build(heads(256, 16, cap=50.0), "plain", 16, stores=True, rare=True),
        _build(heads(128), "plain", 16, dtype=torch.float32, rare=True),
    ]
    return found


KERNEL = Kernel("attend_tokens", [*(case.case() for case in _cases()), *_stored_cases()], _builds())

"""Compiles here what a GPU machine will launch, so that minutes there are not spent compiling: for its Triton's cache.

python -m benchmarks.gpu.ahead FOLDER [--device NAME] [--target sm_90]

Run it with the Triton and the Python of that machine, in a virtual environment (any build of torch), and carry FOLDER there,
to the same path, as TRITON_CACHE_DIR. A thousand kernels take less than 10 MB, packed. Covered are the kernels' cases, linears as
measured, what tuning tries first at one row, and all steps of the engines that are checked and timed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import REPOSITORY

if TYPE_CHECKING:
    from smelt.runtime.kernels.base.launch import Launch
    from smelt.runtime.kernels.base.targets import Target

# What only people read.
_BETWEEN = (".ttir", ".ttgir", ".llir", ".ptx", ".source")


class CompilingDriver:
    """All that Triton asks a driver for before it launches, which it never does here."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self._target.of_triton()

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default."""
        return 0


def main() -> None:
    """Compile in as many processes as there are processors, and keep what launches need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument(
        "--device", default="", help="as torch calls it, if tiles are shipped for it: NVIDIA H100 80GB HBM3"
    )
    parser.add_argument("--share", type=int, nargs=2, metavar=("I", "N"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share:
        _compile(given.target, given.device, *given.share)
        return
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    count = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as link:
        # The repository is the package smelt; here nothing needs to be installed, either.
        (Path(link) / "smelt").symlink_to(REPOSITORY)
        paths = os.pathsep.join([link, str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        failed = _in_shares(("--target", given.target, "--device", given.device), folder, count, paths)
    for path in folder.rglob("*"):
        if path.suffix in _BETWEEN:
            path.unlink()
    kernels = list(folder.rglob("*.cubin"))
    print(f"{len(kernels)} kernels, {sum(path.stat().st_size for path in kernels) / 1e6:.0f} MB in {folder}")
    sys.exit(1 if failed else 0)


def _in_shares(options: tuple[str, ...], folder: Path, count: int, paths: str) -> int:
    """How many processes failed."""
    more = {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "benchmarks.gpu.ahead", str(folder), *options, "--share"]
    shares = [
        subprocess.Popen([*command, str(i), str(count)], env=os.environ | more, cwd=REPOSITORY) for i in range(count)
    ]
    return sum(share.wait() != 0 for share in shares)


def _compile(name: str, device: str, share: int, count: int) -> None:
    from smelt.runtime.kernels.base.launch import overlapping
    from smelt.runtime.kernels.base.targets import TARGETS
    from triton.runtime.driver import driver

    target = TARGETS[name]
    driver.set_active(CompilingDriver(target))  # pyright: ignore[reportArgumentType]
    known = wanted(target, device)
    mine = known[share::count]
    print(f"{len(mine)} of {len(known)} kernels", flush=True)
    failed = 0
    # One after another: Python 3.11 sometimes fails to read kernels in several threads.
    for i, (launch, overlapped) in enumerate(mine, 1):
        try:
            with overlapping(overlapped):
                launch.warm()
        except Exception as error:
            failed += 1
            print(f"{launch.function.__name__}: {type(error).__name__}: {error}", flush=True)
        if i % 50 == 0:
            print(f"{i} of {len(mine)}", flush=True)
    sys.exit(1 if failed else 0)


def wanted(target: Target, device: str = "") -> list[tuple[Launch, bool]]:
    """All launches that are compiled by themselves, and whether they overlap.

    Args:
        target: what for.
        device: whose tiles they have.
    """
    from smelt.runtime.kernels.base.launch import may_overlap, overlapping_at
    from smelt.runtime.kernels.base.precompile import identity

    # Whose tiles are replaced, has to be imported before.
    from smelt.runtime.kernels.tools import registry, tune_linears  # noqa: F401

    from .meta_model import tiles_are_of
    from .parts import linears  # noqa: F401

    found: dict[Any, tuple[Launch, bool]] = {}

    def note(launch: Launch) -> None:
        found.setdefault(identity(launch), (launch, may_overlap()))

    with tiles_are_of(device):
        for launch, rows in _launches(target):
            with overlapping_at(rows):
                note(launch)
        _engines(target, note)
    return list(found.values())


def _engines(target: Target, note: Callable[[Launch], None]) -> None:
    """Every step that engines capture when they start, also of those that are timed without overlap; one layer is as all are."""
    import torch
    from smelt.runtime.cache_types import BY_NAME
    from smelt.runtime.kernels.base.launch import noted, overlapping
    from smelt.runtime.kernels.base.workspace import set_apart

    from .meta_model import FORMATS, executor_on_meta, meta_stands_for
    from .random_checkpoints import LLAMA, QWEN

    # Attention's kernels depend on how many sequences there may be: these are the stages'.
    for size, stored, cache, most in product((LLAMA, QWEN), FORMATS, BY_NAME.values(), (64, 256)):
        with meta_stands_for(target), set_apart(), torch.inference_mode():
            kept = cache.torch_dtype(torch.bfloat16)
            executor = executor_on_meta(
                replace(size, layers=1),
                stored,
                target,
                kept,
                max_num_seqs=most,
                max_num_batched_tokens=2048,
                max_model_len=1024,
            )
            for overlapped in (True, False):
                with overlapping(overlapped), noted(note):
                    for kind in executor._kinds.all():
                        executor._steps.body(kind)


def _launches(target: Target) -> Iterator[tuple[Launch, int]]:
    """And the rows of the steps that they are timed as; checks let all overlap."""
    import torch
    from smelt.runtime.kernels.tiles.tile import tiles_of_target
    from smelt.runtime.kernels.tools.registry import KERNELS
    from smelt.runtime.kernels.tools.tune_linears import linears

    from .parts.linears import plan
    from .place import Place

    for kernel in KERNELS:
        for case in kernel.cases:
            if case.launch is not None and (not case.targets or target.name in case.targets):
                yield case.launch(target), 1
    for planned in plan(Place(torch.device("meta"), rehearses=False, quick=False, runs=1, scratch=None, output=None)):
        if planned.case is not None:
            yield planned.case.launch(target), planned.rows
    # Of int4, the gate's product is compiled apart; in its first rounds tuning tries sizes, then iterations of the best size.
    for one in linears(("int4",), shapes=((4096, 4096), (28672, 4096)), rows=(1,)):
        sizes = one.around(one.shipped(tiles_of_target(target)), 0, target)
        for tile in sizes:
            yield from ((launch, 1) for launch in one.launches(tile, target))
        for tile in dict.fromkeys(replace(size, split=1, step=128, stages=3) for size in sizes if size.rows == 8):
            for found in one.around(tile, 1, target):
                for split in (1, 2) if found.slices == 1 else (1,):
                    yield from ((launch, 1) for launch in one.launches(replace(found, split=split), target))


if __name__ == "__main__":
    main()

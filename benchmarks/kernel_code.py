"""What the GPU kernels' machine code costs, without a GPU: registers, spills, instructions, and what those predict.

For decoding, a kernel can read weights only as fast as its instructions are issued. The prediction is
arithmetic on the H100's published figures (132 units of 128 lanes at 1.755 GHz, 3.35 TB/s), no measurement.
With ``--step`` a whole decode step is predicted, launch by launch (see the folder ``prediction``).
"""

from __future__ import annotations

from dataclasses import asdict

from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.linear.linear_codes import KERNEL
from smelt.runtime.kernels.linear.packing import FORMATS
from smelt.runtime.kernels.tools.check import check

from .common import parser, save
from .prediction import command

LANES_PER_S = 132 * 128 * 1.755e9
BYTES_PER_S = 3.35e12


def main() -> None:
    """Every kernel's code; or the time of a decode step."""
    options = parser(__doc__)
    options.add_argument(
        "--step", action="store_true", help="predict the time of a whole decode step; takes all that follows"
    )
    command.add_options(options)
    given = options.parse_args()
    if given.step:
        command.run(given)
    else:
        every_kernel()


def every_kernel() -> None:
    """Compile everything, print the decode kernels' predictions, save all."""
    found = list(check(list(TARGETS)))
    rows = [asdict(one) for one in found]
    builds = {build.name: build for build in KERNEL.builds}
    target = TARGETS["sm_90"]
    print(f"{'':56}{'bits':>7}{'instructions a weight':>24}{'issue slots at 3.35 TB/s':>27}")
    for row in rows:
        if row["target"] != "sm_90" or row["kernel"] != "linear_codes" or " 1x4096 by 4096 " not in row["build"]:
            continue
        launch = builds[row["build"]].launch(target)
        constants = launch.constants
        scale = {"none": 0, "half": 16, "zero": 32, "full": 32, "e8m0": 8, "e4m3": 8}[constants["KIND"]]
        bits = FORMATS[constants["FORMAT"]].bits + scale / constants["G"]
        each = row["loop"] * launch.warps * 32 / (constants["BN"] * constants["STEP"] * constants["SLICES"])
        share = BYTES_PER_S / (bits / 8) * each / LANES_PER_S
        row["bits_per_weight"], row["instructions_per_weight"], row["issue_share"] = bits, each, share
        print(f"{row['build']:<56}{bits:>7.3f}{each:>24.2f}{share:>27.0%}")
    faults = sum(bool(one.faults) for one in found)
    print(
        f"\n{len(found)} compiled, {faults} with faults: {save('kernel_code', 'python -m benchmarks.kernel_code', rows)}"
    )


if __name__ == "__main__":
    main()

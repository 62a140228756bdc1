"""This machine's constants, measured where it has not been calibrated."""

from __future__ import annotations

from collections.abc import Callable

from ...system.progress import Log


def rates_of_this_machine(log: Log) -> Callable[[], tuple[float, float]]:
    """What measures its memory bandwidth and its products in bfloat16, for :func:`~smelt.runtime.costs.device_cost.device_cost`.

    Args:
        log: gets a sentence when it begins to measure.
    """

    def measured() -> tuple[float, float]:
        import torch

        from .machine_rates import product_rate, read_rate

        log("this machine is not calibrated: measuring its bandwidth and products (smelt bench --calibrate is better)")
        return read_rate(), product_rate(torch.bfloat16)

    return measured

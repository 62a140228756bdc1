"""Iteration-level scheduling against static batches."""

from __future__ import annotations

import statistics

from smelt.runtime.simulate.simulation import simulate

from .setting import A100, LLAMA_13B, PAPER_POSITIONS, Row, Study, blocks_of, cost_of, reserved, running

_LONGEST = 2048
_OUTPUTS = (
    "fixed:128", "lognormal:128,0.25", "lognormal:128,0.5", "exponential:128", "lognormal:128,1", "lognormal:128,1.5",
)  # fmt: skip


def iterations(study: Study) -> list[Row]:
    """Orca: sequences that end make room at once. Both reserve the maximum length, in equal memory."""
    rows = []
    cost = cost_of(LLAMA_13B, A100)
    for positions in (PAPER_POSITIONS, 16 * blocks_of(LLAMA_13B, A100)):
        for outputs in _OUTPUTS:
            arrivals = study.random("fixed:512", outputs, 1000, longest=_LONGEST)
            lengths = [each.output for each in arrivals]
            static, orca = (
                simulate(arrivals, reserved(positions, _LONGEST, policy=policy, max_num_batched_tokens=8192), cost)
                for policy in ("static", "orca")
            )
            rows.append(
                {
                    "outputs": outputs, "places": positions // _LONGEST, "requests": len(arrivals),
                    "variation": statistics.pstdev(lengths) / statistics.mean(lengths),
                    "static_rate": static.output_rate, "orca_rate": orca.output_rate,
                    "ratio": orca.output_rate / static.output_rate,
                    "static_running": running(static), "orca_running": running(orca),
                }
            )  # fmt: skip
    return rows

"""How many items a guarantee needs if evaluation stops as soon as it is known, in simulated draws.

    python -m benchmarks.evaluation.early_stop [--draws 2000]

Each item is lost, gained or answered as before, with given probabilities. It is looked at where an evaluation looks: after 64 items and each time that
they have doubled.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
from smelt.compress.evaluation.early_stop import parts
from smelt.compress.results.betting import log_wealth

from ..common import parser, save

ITEMS, ALPHA = 5000, 0.05
# Limit, probability that an item is lost, and that it is gained.
CASES = [
    (0.01, 0.01, 0.01),
    (0.01, 0.03, 0.03),
    (0.02, 0.01, 0.01),
    (0.02, 0.03, 0.03),
    (0.05, 0.03, 0.03),
    (0.02, 0.04, 0.03),
    (0.02, 0.05, 0.03),
    (0.02, 0.08, 0.03),
    (0.02, 0.15, 0.05),
]


def simulated(limit: float, lost: float, gained: float, draws: int) -> dict[str, Any]:
    """Verdicts and items over many draws."""
    draw = np.random.default_rng(0)
    looks = np.cumsum([len(part) for part in parts(ITEMS)])
    enough, verdicts, needed = -math.log(ALPHA), {"certified": 0, "refuted": 0, "undecided": 0}, []
    for _ in range(draws):
        values = draw.choice([1.0, -1.0, 0.0], size=ITEMS, p=[lost, gained, 1 - lost - gained])
        below = np.asarray(log_wealth(values.tolist(), limit, -1.0, 1.0))[looks - 1]
        above = np.asarray(log_wealth((-values).tolist(), -limit, -1.0, 1.0))[looks - 1]
        known = np.flatnonzero((below >= enough) | (above >= enough))
        first = int(known[0]) if len(known) else len(looks) - 1
        verdict = "undecided" if not len(known) else "certified" if below[first] >= enough else "refuted"
        verdicts[verdict] += 1
        needed.append(int(looks[first]))
    return {
        "limit": limit,
        "lost": lost,
        "gained": gained,
        **{verdict: count / draws for verdict, count in verdicts.items()},
        "mean_items": statistics.mean(needed),
        "median_items": statistics.median(needed),
    }


def main() -> None:
    """Simulate all cases."""
    options = parser(__doc__)
    options.add_argument("--draws", type=int, default=2000)
    draws = options.parse_args().draws
    rows = []
    for case in CASES:
        rows.append(simulated(*case, draws))
        print(rows[-1], flush=True)
    found = {"items": ITEMS, "confidence": 1 - ALPHA, "draws": draws, "rows": rows}
    print(save("early_stop", f"python -m benchmarks.evaluation.early_stop --draws {draws}", found))


if __name__ == "__main__":
    main()

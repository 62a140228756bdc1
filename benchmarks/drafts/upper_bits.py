"""Answers from the upper four of 8 bits beside answers from all of them, in turns.

    python -m benchmarks.drafts.upper_bits [--turns 5]

A Llama of 1.1 billion random weights in W4in8, without drafts: what a server gains from answering so, by the number of sequences.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from smelt.runtime import Engine, SamplingParams
from smelt.runtime.requests.sequence import Request

from ..common import add_scratch, parser, save
from ..random_model import build_billion
from .forms import forms_of
from .speculation import PROMPT, random_prompts

OUTPUT, LOADS = 48, (1, 8, 16)


class OneKind(Engine):
    """An engine that answers all requests alike, however many wait."""

    answers_from_upper = False

    def _submit(self, request: Request, sink: Any) -> None:
        # No request finds another's keys and values.
        request.upper_bits, request.salt = self.answers_from_upper, random.randbytes(8)
        super()._submit(request, sink)


def tokens_a_second(engine: OneKind, prompts: list[list[int]], *, upper: bool) -> float:
    """Of one turn."""
    engine.answers_from_upper = upper
    begun = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True))
    return len(prompts) * OUTPUT / (time.perf_counter() - begun)


def main() -> None:
    """Measure all loads."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    model = build_billion(given.scratch)
    checkpoint = forms_of(model, given.scratch, calibrated=False)["w4in8"]
    # So many never wait: the turns say what answers.
    engine = OneKind(
        checkpoint,
        drafter="nested",
        upper_bits_at=10**6,
        max_num_seqs=max(LOADS),
        max_model_len=PROMPT + OUTPUT,
        quiet=True,
    )
    engine.core.drafting = engine.scheduler.drafting = None
    rows = []
    for count in LOADS:
        prompts = random_prompts(count)
        for upper in (False, True):
            tokens_a_second(engine, prompts, upper=upper)
        turns = [
            (tokens_a_second(engine, prompts, upper=False), tokens_a_second(engine, prompts, upper=True))
            for _ in range(given.turns)
        ]
        rows.append(
            {
                "sequences": count,
                "whole": statistics.median(whole for whole, _ in turns),
                "upper": statistics.median(upper for _, upper in turns),
                "ratios": [round(upper / whole, 3) for whole, upper in turns],
            }
        )
        print(rows[-1], flush=True)
    found = {"turns": given.turns, "prompt": PROMPT, "output": OUTPUT, "rows": rows}
    print(save("upper_bits", f"python -m benchmarks.drafts.upper_bits --turns {given.turns}", found))


if __name__ == "__main__":
    main()

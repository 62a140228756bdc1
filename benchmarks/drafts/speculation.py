"""Speculative decoding beside the same engine without drafts, in turns.

    python -m benchmarks.drafts.speculation --scratch /var/tmp/smelt-cpu [--turns 5]

First smelt-6m and its own forms on real text, whose acceptance is real. Then a Llama of 1.1 billion seeded random weights, which says nothing
of acceptance: its drafters do all their work, and each of their tokens is then replaced by the right one with the probability that was measured for
the same pair of formats of smelt-6m, and by a wrong one otherwise; lookup has as many tokens as are asked for, as if it always found some. Each row is one engine: a turn without drafts, a turn with them.
Turns of smelt-6m take a twentieth of a second, of which other processes can take any part: there are eight times as many.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.speculation.length import FixedDrafts

from ..common import REPOSITORY, SHARED, save
from ..random_model import BIG, build
from .forced import Acceptance, force

SMALL = REPOSITORY / "models" / "builtin" / "smelt-6m"
PROMPT, OUTPUT = 64, 64
MORE = 8  # turns of the small model
FORMS: dict[str, dict[str, Any]] = {
    "w4": {"scheme": "W4A16", "rounding": "gptq"},
    "w4in8": {"scheme": "W4in8"},
}


@dataclass(frozen=True)
class Pair:
    """A model with what drafts for it.

    Attributes:
        name: of both.
        model: its checkpoint.
        drafter: as the engine has it.
        copies: whether prompts are made so that the output repeats them.
    """

    name: str
    model: Path
    drafter: str
    copies: bool = False


def turn(engine: Engine, prompts: SequenceOf[list[int]], output: int) -> tuple[float, list[list[int]]]:
    """Tokens a second from when all prompts are computed, and the tokens."""
    engine.cache.forget()
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    done: dict[str, list[int]] = {}
    begun, before = time.perf_counter(), 0
    while len(done) < len(names):
        running = engine.scheduler.running
        if not before and len(running) == len(names) and all(each.generated for each in running):
            begun, before = time.perf_counter(), sum(len(each.generated) for each in running)
        for found in engine.step():
            if found.finished:
                done[found.id] = found.completions[0].tokens
    return (output * len(names) - before) / (time.perf_counter() - begun), [done[name] for name in names]


def opened(pair: Pair, **options: Any) -> Engine:
    """An engine of a pair, for prompts and outputs of these lengths."""
    return Engine(
        pair.model,
        drafter=pair.drafter,
        quiet=True,
        max_length=PROMPT + OUTPUT,
        max_sequences=32,
        token_budget=512,
        **options,
    )


def measure(
    pair: Pair,
    prompts: SequenceOf[list[int]],
    *,
    turns: int,
    forced: Acceptance | None = None,
    draft_tokens: int | str = "auto",
) -> dict[str, Any]:
    """Medians of turns without and with drafts."""
    engine = opened(pair, draft_tokens=draft_tokens)
    drafting = engine.drafting
    assert drafting is not None
    draft(engine, None)
    _, alone = turn(engine, prompts, OUTPUT)
    if forced is not None:
        force(engine, prompts, alone, forced)
    draft(engine, drafting)
    turn(engine, prompts, OUTPUT)
    before, rates, same = drafting.total.copy(), [], True
    for _ in range(turns):
        draft(engine, None)
        plain, _ = turn(engine, prompts, OUTPUT)
        draft(engine, drafting)
        drafted, tokens = turn(engine, prompts, OUTPUT)
        rates.append((plain, drafted))
        same = same and tokens == alone
    engine.close()
    counts = drafting.total.since(before)
    ratios = [drafted / plain for plain, drafted in rates]
    found = {
        "pair": pair.name,
        "sequences": len(prompts),
        "draft_tokens": draft_tokens,
        "forced": None if forced is None else forced.share,
        "plain": statistics.median(plain for plain, _ in rates),
        "drafted": statistics.median(drafted for _, drafted in rates),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "same_tokens": same,
        "per_verification": counts.tokens_per_verification,
        "drafts": sum(counts.drafted) / counts.verified if counts.verified else 0.0,
        "by_position": [round(share, 3) for share in counts.by_position()],
        "agreement": counts.agreement,
    }
    print({key: value for key, value in found.items() if key != "by_position"}, flush=True)
    return found


def draft(engine: Engine, drafting: FixedDrafts | None) -> None:
    """Let it draft or not; what it does not draft teaches it nothing of drafts, and makes no room for losses."""
    engine.drafting = engine.scheduler.drafting = drafting


def text_prompts(engine_tokens: list[int], count: int, *, copies: bool) -> list[list[int]]:
    """Pieces of a text; for copying, a piece twice and the beginning of a third time."""
    if not copies:
        return [engine_tokens[i * 400 : i * 400 + PROMPT] for i in range(count)]
    pieces = [engine_tokens[i * 400 : i * 400 + 24] for i in range(count)]
    return [[*piece, *piece, *piece[:16]] for piece in pieces]


def random_prompts(count: int) -> list[list[int]]:
    """Prompts for a model of random weights."""
    draw = random.Random(0)
    return [[draw.randrange(4, BIG.vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def forms_of(model: Path, scratch: Path, *, calibrated: bool) -> dict[str, Path]:
    """The model's compressed forms; those that exist are kept."""
    found = {}
    for name, quantize in FORMS.items():
        settings = {**quantize, "ignore": []}
        if not calibrated:  # random weights, whose values nobody reads
            settings |= {"rounding": "nearest"}
        recipe = {
            "model": str(model),
            "output": str(scratch / f"{model.name}-{name}"),
            "evaluate": False,
            "steps": [{"quantize": settings}],
        }
        found[name] = run(Recipe.model_validate(recipe)).checkpoint
    return found


def small(scratch: Path, turns: int) -> list[dict[str, Any]]:
    """smelt-6m, its forms, and real text."""
    forms = forms_of(SMALL, scratch, calibrated=True)
    probe = Engine(SMALL, quiet=True)
    text = (SHARED / "data" / "text" / "wikitext2_valid_unk.txt").read_text(encoding="utf-8")[:40000]
    tokens = list(probe.tokenizer(text).input_ids)
    probe.close()
    pairs = [
        Pair("bf16, drafted by W4", SMALL, str(forms["w4"])),
        Pair("W4in8, drafted by its upper bits", forms["w4in8"], "nested"),
        Pair("bf16, drafted by lookup", SMALL, "lookup"),
        Pair("bf16, lookup, copying", SMALL, "lookup", copies=True),
    ]
    rows = []
    for pair in pairs:
        prompts = text_prompts(tokens, 8, copies=pair.copies)
        rows.append(measure(pair, prompts[:1], turns=MORE * turns))
        rows.append(measure(pair, prompts, turns=MORE * turns))
        rows.append(measure(pair, prompts, turns=1, draft_tokens=3))  # for the acceptance of a fixed number
    return rows


def big(scratch: Path, turns: int, shares: dict[str, float]) -> list[dict[str, Any]]:
    """A Llama of 1.1 billion weights."""
    model = scratch / "bf16"
    if not (model / "config.json").is_file():
        build(model, 16, BIG)
    forms = forms_of(model, scratch, calibrated=False)
    pairs = {
        "bf16, drafted by W4": Pair("bf16, drafted by W4", model, str(forms["w4"])),
        "W4in8, drafted by its upper bits": Pair("W4in8, drafted by its upper bits", forms["w4in8"], "nested"),
        "bf16, lookup, copying": Pair("bf16, lookup, copying", model, "lookup", copies=True),
    }
    prompts = random_prompts(8)
    repeated = [[*p[:24], *p[:24], *p[:16]] for p in prompts]
    rows = []
    for name, pair in pairs.items():
        asked = repeated if pair.copies else prompts
        for count in (1, 8):
            rows.append(measure(pair, asked[:count], turns=turns, forced=Acceptance(shares[name])))
    for count in (1, 8):  # a drafter that is always wrong
        wrong = replace(pairs["bf16, drafted by W4"], name="bf16, drafted by W4, always wrong")
        rows.append(measure(wrong, prompts[:count], turns=turns, forced=Acceptance(0.0)))
    return rows


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, Any] = {"turns": given.turns, "small": small(given.scratch, given.turns)}
    fixed = {row["pair"]: row["agreement"] for row in found["small"] if row["draft_tokens"] == 3}
    found["big"] = big(given.scratch, given.turns, fixed)
    print(save("speculation", f"python -m benchmarks.drafts.speculation --turns {given.turns}", found))


if __name__ == "__main__":
    main()

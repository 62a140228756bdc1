"""Speculative decoding beside the same engine without drafts, in turns.

    python -m benchmarks.drafts.speculation [--turns 5] [--results speculation]

First smelt-6m and its own forms on real text, whose acceptance is real; ``trained`` ones have learned to agree with it. Then a Llama of 1.1 billion seeded random weights, which says nothing
of acceptance: its drafters do all their work, and what they choose is then replaced by a right or a wrong token, as it was of the same pair of
formats of smelt-6m from some place on, with the odds that its second choice had there; what lookup finds in a text of smelt-6m, another one for each request, or in an edited copy of a
text, is replaced by right tokens where it is right there. Rows that are in the results already are not measured again. Each row is one engine: a turn without drafts and one with them, in this order and then in the other.
Turns of smelt-6m take a twentieth of a second, of which other processes can take any part: there are eight times as many.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smelt.runtime import Engine, SamplingParams
from smelt.runtime.speculation.fixed_length import FixedDrafts
from smelt.runtime.speculation.length import AdaptiveDrafts
from smelt.runtime.speculation.lookup_first import lookup_of, weights_of

from ..common import SMELT_6M, WIKITEXT_VALIDATION, ResultRows, add_scratch, parser, save, saved, shared
from ..random_model import BIG, build_billion
from .forced import Acceptance, RecordedDrafts, force
from .forms import forms_of, trained_forms

PROMPT, OUTPUT = 64, 64
RECORDED = 48  # prompts by which acceptance is measured
MORE = 8  # turns of the small model
TRAINED = ("bf16, drafted by W4, trained", "W4in8, drafted by its upper bits, trained")
EDITED = 0.1  # tokens of a copy that are others than those of the prompt


@dataclass(frozen=True)
class Pair:
    """A model with what drafts for it.

    Attributes:
        name: of both.
        model: its checkpoint.
        drafter: as the engine has it.
    """

    name: str
    model: Path
    drafter: str


def turn(engine: Engine, prompts: SequenceOf[list[int]], output: int) -> tuple[float, list[list[int]]]:
    """Tokens a second while all run, from when all prompts are computed until the first answer ends, and the tokens."""
    engine.cache.forget()
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    done: dict[str, list[int]] = {}
    begun, before, speed = time.perf_counter(), 0, 0.0
    while len(done) < len(names):
        running = list(engine.scheduler.running)
        if not before and len(running) == len(names) and all(each.generated for each in running):
            begun, before = time.perf_counter(), sum(len(each.generated) for each in running)
        for found in engine.step():
            if found.finished:
                done[found.request_id] = found.outputs[0].token_ids
        if done and not speed:
            speed = (sum(len(each.generated) for each in running) - before) / (time.perf_counter() - begun)
    return speed, [done[name] for name in names]


def opened(pair: Pair, *, drafts: bool = True, **options: Any) -> Engine:
    """An engine of a pair, or of its model alone, for prompts and outputs of these lengths."""
    return Engine(
        pair.model,
        drafter=pair.drafter if drafts else None,
        quiet=True,
        max_model_len=PROMPT + OUTPUT,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        **options,
    )


def measure(
    pair: Pair,
    prompts: SequenceOf[list[int]],
    *,
    turns: int,
    forced: Acceptance | None = None,
    apart: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Medians of turns without and with drafts, by an engine with these options; ``apart``: those without by another one, which has
    no drafter, as a model leaves states for a draft head whether that drafts or not."""
    engine = opened(pair, **options)
    plain = opened(pair, drafts=False, **options) if apart else engine
    drafting = engine.drafting
    assert isinstance(drafting, AdaptiveDrafts)
    draft(engine, None)
    _, alone = turn(plain, prompts, OUTPUT)
    if forced is not None:
        force(engine, prompts, alone, forced, [drafting])
    draft(engine, drafting)
    turn(engine, prompts, OUTPUT)
    before, rates, same = drafting.total.copy(), [], True
    for number in range(turns):
        speeds = {}
        for drafts in (False, True) if number % 2 == 0 else (True, False):
            if not apart:
                draft(engine, drafting if drafts else None)
            speeds[drafts], tokens = turn(engine if drafts else plain, prompts, OUTPUT)
            same = same and tokens == alone
        rates.append((speeds[False], speeds[True]))
    engine.close()
    plain.close()
    counts = drafting.total.since(before)
    ratios = [drafted / plain for plain, drafted in rates]
    found = {
        "pair": pair.name,
        "sequences": len(prompts),
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
        "looked_up": counts.looked_up / counts.all_drafted if counts.all_drafted else 0.0,
    }
    print(f"{pair.name}, {len(prompts)} at once: {found['ratio']:.2f}", flush=True)
    return found


def acceptance(pair: Pair, prompts: SequenceOf[list[int]], branches: int = 0) -> Acceptance:
    """How often drafts of three tokens are right, eight sequences at a time."""
    engine = opened(pair, draft_tokens=3, draft_branches=branches)
    assert engine.drafter is not None
    has_weights = weights_of(engine.drafter) is not None
    where = lookup_of(engine.drafter) if has_weights else None
    recorded = RecordedDrafts(3, branches, engine.drafter.longest_branch, where, seconds=has_weights)
    draft(engine, recorded)
    for begin in range(0, len(prompts), 8):
        asked = prompts[begin : begin + 8]
        recorded.texts += zip(asked, turn(engine, asked, OUTPUT)[1], strict=True)
    engine.close()
    return recorded.acceptance()


def draft(engine: Engine, drafting: FixedDrafts | None) -> None:
    """Let it draft or not; what it does not draft teaches it nothing of drafts, and makes no room for losses."""
    engine.core.drafting = engine.scheduler.drafting = drafting


def text_prompts(engine_tokens: list[int], count: int) -> list[list[int]]:
    """Pieces of a text."""
    return [engine_tokens[i * 400 : i * 400 + PROMPT] for i in range(count)]


def edited_copies(prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Prompts with answers that repeat them, with one token in ten replaced by another of the prompt, as in code that is edited."""
    draw = random.Random(0)
    return [
        (prompt, [draw.choice(prompt) if draw.random() < EDITED else token for token in prompt]) for prompt in prompts
    ]


def random_prompts(count: int) -> list[list[int]]:
    """Prompts for a model of random weights."""
    draw = random.Random(0)
    return [[draw.randrange(4, BIG.vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def small(
    scratch: Path, turns: int, rows: ResultRows, *, trains: bool
) -> tuple[dict[str, Acceptance], list[list[int]]]:
    """smelt-6m, its forms, and real text: how often drafts are right, and the prompts; speeds are added to the rows.

    Args:
        scratch: where forms are.
        turns: of each row.
        rows: of the results.
        trains: whether there are trained forms, too, which take an hour to make.
    """
    forms = forms_of(SMELT_6M, scratch, calibrated=True)
    probe = Engine(SMELT_6M, quiet=True)
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:100000]
    prompts = text_prompts(list(probe.tokenizer(text).input_ids), RECORDED)
    probe.close()
    pairs = [
        Pair("bf16, drafted by W4", SMELT_6M, str(forms["w4"])),
        Pair("W4in8, drafted by its upper bits", forms["w4in8"], "nested"),
        Pair("bf16, drafted by lookup", SMELT_6M, "lookup"),
        Pair("bf16, drafted by lookup, else W4", SMELT_6M, f"lookup+{forms['w4']}"),
        Pair("W4in8, drafted by lookup, else its upper bits", forms["w4in8"], "lookup+nested"),
    ]
    if trains:
        trained = trained_forms(scratch)
        pairs += [
            Pair(TRAINED[0], SMELT_6M, str(trained["w4"])),
            Pair(TRAINED[1], trained["w4in8"], "nested"),
        ]
    known = {pair.name: acceptance(pair, prompts) for pair in pairs}
    for pair in pairs:
        for count in (1, 8):
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(measure(pair, prompts[:count], turns=MORE * turns))
    return known, prompts


def big(scratch: Path, turns: int, known: dict[str, Acceptance], texts: list[list[int]], rows: ResultRows) -> None:
    """A Llama of 1.1 billion weights."""
    model = build_billion(scratch)
    forms = forms_of(model, scratch, calibrated=False)
    w4, nested = "bf16, drafted by W4", "W4in8, drafted by its upper bits"
    copies = edited_copies(texts)
    with_texts = {name: replace(known[name], texts=known["bf16, drafted by lookup"].texts) for name in (w4, nested)}
    with_copies = {name: replace(each, texts=copies) for name, each in with_texts.items()}
    lookup, else_w4, else_nested = "bf16, drafted by lookup", f"lookup+{forms['w4']}", "lookup+nested"
    cases = [
        (Pair(w4, model, str(forms["w4"])), known[w4]),
        (Pair(nested, forms["w4in8"], "nested"), known[nested]),
        (Pair(TRAINED[0], model, str(forms["w4"])), known.get(TRAINED[0])),
        (Pair(TRAINED[1], forms["w4in8"], "nested"), known.get(TRAINED[1])),
        (Pair(lookup, model, "lookup"), with_texts[w4]),
        (Pair(f"{lookup}, else W4", model, else_w4), with_texts[w4]),
        (Pair("W4in8, drafted by lookup, else its upper bits", forms["w4in8"], else_nested), with_texts[nested]),
        (Pair("copying: bf16, drafted by lookup", model, "lookup"), with_copies[w4]),
        (Pair("copying: bf16, drafted by lookup, else W4", model, else_w4), with_copies[w4]),
        (
            Pair("copying: W4in8, drafted by lookup, else its upper bits", forms["w4in8"], else_nested),
            with_copies[nested],
        ),
        (Pair("bf16, drafted by W4, always wrong", model, str(forms["w4"])), known[w4].always_wrong()),
    ]
    prompts = random_prompts(8)
    for count in (1, 8):
        for pair, forced in cases:
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(measure(pair, prompts[:count], turns=turns, forced=forced))


def main() -> None:
    """Measure both."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--results", default="speculation", help="file of the results, %(default)s by default")
    given = options.parse_args()
    command = f"python -m benchmarks.drafts.speculation --turns {given.turns} --results {given.results}"
    save(given.results, command, {**(saved(given.results) or {}), "turns": given.turns})
    first, second = (ResultRows(given.results, command, name) for name in ("small", "big"))
    trains = not all(
        rows.has(pair=pair, sequences=count) for rows in (first, second) for pair in TRAINED for count in (1, 8)
    )
    known, texts = small(given.scratch, given.turns, first, trains=trains)
    big(given.scratch, given.turns, known, texts, second)


if __name__ == "__main__":
    main()

"""Token trees beside chains and beside no drafts, in turns, under load.

    python -m benchmarks.drafts.trees [--turns 5] [--results token_trees]

smelt-6m on real text, and a Llama of 1.1 billion random weights whose drafts are right as often as was measured of the same pair of smelt-6m: how
often a chain's next token is, and how often one of the branches is that begin where the chain is wrong. One engine has a turn without drafts, one with chains and
one with trees of up to four branches; both kinds of drafts adapt. Rows that are in the results already are not measured again.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from smelt.runtime import Engine
from smelt.runtime.engine.executors.draft_lengths import drafting_of
from smelt.runtime.speculation.length import AdaptiveDrafts

from ..common import SMELT_6M, WIKITEXT_VALIDATION, ResultRows, add_scratch, parser, save, saved, shared
from ..random_model import build_billion
from .forced import Acceptance, begin_texts, force
from .forms import forms_of
from .speculation import (
    MORE,
    OUTPUT,
    RECORDED,
    Pair,
    acceptance,
    draft,
    opened,
    random_prompts,
    text_prompts,
    turn,
)

BRANCHES = 4
SEQUENCES = (1, 8)


def compare(pair: Pair, prompts: list[list[int]], turns: int, forced: Acceptance | None = None) -> dict[str, Any]:
    """Medians of turns without drafts, with chains, and with trees."""
    engine = opened(pair, draft_branches=BRANCHES)
    trees = engine.drafting
    assert isinstance(trees, AdaptiveDrafts)
    assert engine.drafter is not None
    chains = drafting_of(replace(engine.config, draft_branches=0), engine.drafter, engine.executor)
    assert isinstance(chains, AdaptiveDrafts)
    draft(engine, None)
    _, alone = turn(engine, prompts, OUTPUT)
    if forced is not None:
        force(engine, prompts, alone, forced, [chains, trees])
    rates: list[tuple[float, ...]] = []
    same = True
    for number in range(turns + 1):
        found = [0.0] * 3
        for place in range(3):
            which = (place + number) % 3  # each is the first one in turn
            draft(engine, (None, chains, trees)[which])
            begin_texts(engine, number * len(prompts))  # or chains and trees would be compared on different ones
            found[which], tokens = turn(engine, prompts, OUTPUT)
            same = same and tokens == alone
        if number:  # the first one learns
            rates.append(tuple(found))
    engine.close()
    return {
        "pair": pair.name,
        "sequences": len(prompts),
        "forced": None if forced is None else forced.share,
        "rates": [[round(rate, 2) for rate in each] for each in rates],
        "chains": statistics.median(chain / plain for plain, chain, _ in rates),
        "trees": statistics.median(tree / plain for plain, _, tree in rates),
        "beside": [round(tree / chain, 3) for _, chain, tree in rates],
        "chain_tokens": chains.total.tokens_per_verification,
        "tree_tokens": trees.total.tokens_per_verification,
        "branched": trees.total.branched / trees.total.verified if trees.total.verified else 0.0,
        "same_tokens": same,
    }


def main() -> None:
    """Measure both models."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--results", default="token_trees", help="file of the results, %(default)s by default")
    given = options.parse_args()
    command = f"python -m benchmarks.drafts.trees --turns {given.turns} --results {given.results}"
    probe = Engine(SMELT_6M, quiet=True)
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:100000]
    tokens = list(probe.tokenizer(text).input_ids)
    probe.close()
    prompts = text_prompts(tokens, RECORDED)
    forms = forms_of(SMELT_6M, given.scratch, calibrated=True)
    small = [
        Pair("bf16, drafted by W4", SMELT_6M, str(forms["w4"])),
        Pair("W4in8, drafted by its upper bits", forms["w4in8"], "nested"),
        Pair("bf16, drafted by its first 3 of 6 layers", SMELT_6M, "early-exit:3"),
        Pair("bf16, drafted by lookup", SMELT_6M, "lookup"),
    ]
    known = {pair.name: acceptance(pair, prompts, BRANCHES) for pair in small}
    print(known, flush=True)
    shares = {name: {"share": each.share, "caught": each.caught} for name, each in known.items()}
    first = {"turns": given.turns, "branches": BRANCHES, "acceptance": shares}
    save(given.results, command, {**(saved(given.results) or {}), **first})
    rows = ResultRows(given.results, command, "small")
    for count in SEQUENCES:
        for pair in small:
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(compare(pair, prompts[:count], MORE * given.turns))

    model = build_billion(given.scratch)
    asked = random_prompts(8)
    forms = forms_of(model, given.scratch, calibrated=False)
    big = [
        Pair(small[0].name, model, str(forms["w4"])),
        Pair(small[1].name, forms["w4in8"], "nested"),
        Pair("bf16, drafted by its first 8 of 16 layers", model, "early-exit:8"),
        Pair(small[3].name, model, "lookup"),
    ]
    rows = ResultRows(given.results, command, "big")
    for count in SEQUENCES:
        for pair, like in zip(big, small, strict=True):
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(compare(pair, asked[:count], given.turns, known[like.name]))


if __name__ == "__main__":
    main()

"""Draft heads (EAGLE-3) beside no drafts and beside a model's W4 form, in turns.

    python -m benchmarks.drafts.heads [--turns 5] [--tokens 1M] [--results heads]

A head is trained for smelt-6m by what ``smelt distill --for-drafting --head`` runs, and written in bfloat16 and in W4A16. Then a Llama of 1.1 billion
seeded random weights has random heads of its own size, whose tokens are made right as often as those of smelt-6m's were on the builtin evaluation text (see
benchmarks.drafts.speculation). What of drafts is right on WikiText-2, which is unlike what the head has learned from, is measured beside. The turns without
drafts are those of an engine without a drafter. Rows that are in the results already are not measured again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from smelt.compress.evaluation.settings import Evaluate
from smelt.compress.pipeline.draft_head import HeadRequest, make_head
from smelt.distill.heads.head_files import write_head
from smelt.distill.heads.head_module import HeadModule, HeadShape
from smelt.distill.settings import Training
from smelt.models.directory.directory import ModelDirectory
from smelt.models.text.text_source import TextSource
from smelt.quant.scheme import resolve
from smelt.runtime.measure.workload import text_prompts as prompts_of

from ..common import SMELT_6M, WIKITEXT_VALIDATION, ResultRows, add_scratch, parser, save, saved, shared
from ..random_model import build_billion
from .forms import forms_of
from .speculation import (
    MORE,
    PROMPT,
    RECORDED,
    Pair,
    acceptance,
    measure,
    random_prompts,
    text_prompts,
)

# How a head is trained; smelt distill's other settings are its defaults.
TRAINING = {"data": {"writer": "teacher"}, "learning_rate": 2e-3, "batch": 8}


def trained_head(scratch: Path, tokens: str) -> Path:
    """A head for smelt-6m; one that exists is kept."""
    training = Training.model_validate({**TRAINING, "tokens": tokens})
    nothing = Evaluate.model_validate({"windows": 1, "samples": 0, "speed": False})
    return make_head(HeadRequest(str(SMELT_6M), scratch / f"smelt-6m-head-{tokens}", training, nothing)).checkpoint


def in_four_bits(head: Path, model: Path, directory: Path) -> Path:
    """The same head in W4A16."""
    if not directory.exists():
        module = HeadModule(_shape(model))
        stored = load_file(head / "model.safetensors")
        module.load_state_dict({name: stored[name].float() for name in module.state_dict()})
        write_head(directory, module, None, torch.bfloat16, resolve("W4A16"))
    return directory


def random_head(model: Path, directory: Path) -> Path:
    """A head with random weights."""
    if not directory.exists():
        torch.manual_seed(0)
        module = HeadModule(_shape(model))
        module.begin(None, torch.randn_like(module.lm_head.weight) * 0.02, seed=0)
        write_head(directory, module, None, torch.bfloat16, None)
    return directory


def _shape(model: Path) -> HeadShape:
    config: Any = ModelDirectory("", model).config()
    return HeadShape.of(config, config.num_hidden_layers, config.vocab_size)


def pairs_of(model: Path, w4: Path, head: Path, head_w4: Path) -> list[Pair]:
    """A model with what drafts for it."""
    return [
        Pair("bf16, drafted by its W4 form", model, str(w4)),
        Pair("bf16, drafted by a draft head", model, str(head)),
        Pair("bf16, drafted by a W4 draft head", model, str(head_w4)),
        Pair("W4, drafted by a W4 draft head", w4, str(head_w4)),
    ]


def main() -> None:
    """Measure both models."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--tokens", default="1M")
    options.add_argument("--results", default="heads", help="file of the results, %(default)s by default")
    given = options.parse_args()
    scratch, turns = given.scratch, given.turns
    command = f"python -m benchmarks.drafts.heads --turns {turns} --tokens {given.tokens} --results {given.results}"
    head = trained_head(scratch, given.tokens)
    small = pairs_of(
        SMELT_6M,
        forms_of(SMELT_6M, scratch, calibrated=True)["w4"],
        head,
        in_four_bits(head, SMELT_6M, scratch / f"smelt-6m-head-{given.tokens}-w4"),
    )
    tokenizer = ModelDirectory("", SMELT_6M).tokenizer()
    make = prompts_of(tokenizer, PROMPT, TextSource("builtin", "evaluation"))
    prompts = [make(PROMPT, seed) for seed in range(RECORDED)]
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:100000]
    others = text_prompts(list(tokenizer(text).input_ids), RECORDED)
    known = {pair.name: acceptance(pair, prompts) for pair in small}
    record = json.loads((head / "smelt.json").read_text(encoding="utf-8"))["draft_head"]
    first = {
        "turns": turns,
        "tokens": given.tokens,
        "held_out": record["training"]["curve"][-1]["held_out"],
        "acceptance": {
            "builtin": {name: each.share for name, each in known.items()},
            "WikiText-2": {pair.name: acceptance(pair, others).share for pair in small},
        },
    }
    save(given.results, command, {**(saved(given.results) or {}), **first})
    rows = ResultRows(given.results, command, "small")
    for pair in small:
        for count in (1, 8):
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(measure(pair, prompts[:count], turns=MORE * turns, apart=True))
    model = build_billion(scratch)
    random = random_head(model, scratch / "head")
    w4 = forms_of(model, scratch, calibrated=False)["w4"]
    pairs = pairs_of(model, w4, random, in_four_bits(random, model, scratch / "head-w4"))
    rows = ResultRows(given.results, command, "big")
    for pair in (pairs[0], pairs[2]):
        for count in (1, 8):
            if not rows.has(pair=pair.name, sequences=count):
                rows.add(measure(pair, random_prompts(count), turns=turns, forced=known[pair.name], apart=True))


if __name__ == "__main__":
    main()

"""Drafts of a model that is divided between two processes, beside the same engine without drafts, in turns.

    python -m benchmarks.drafts.ranks [--turns 5] [--results drafts_on_ranks]

The Llama of 1.1 billion random weights of benchmarks.drafts.speculation, one sequence, drafts made right as often as those of the same pair of smelt-6m are.
A checkpoint drafts on the first process, with the threads of both; of the upper bits each has a part. Rows that are in the results already are
not measured again.
"""

from __future__ import annotations

from smelt.runtime import Engine

from ..common import SMELT_6M, WIKITEXT_VALIDATION, ResultRows, add_scratch, parser, save, saved, shared
from ..random_model import build_billion
from .forms import forms_of
from .speculation import RECORDED, Pair, acceptance, measure, random_prompts, text_prompts

WAYS = {"alone": {}, "--tp 2": {"tp": 2}, "--pp 2": {"pp": 2}}


def main() -> None:
    """Measure each pair each way."""
    options = parser(__doc__)
    add_scratch(options)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--results", default="drafts_on_ranks", help="file of the results, %(default)s by default")
    given = options.parse_args()
    command = f"python -m benchmarks.drafts.ranks --turns {given.turns}"
    save(given.results, command, {**(saved(given.results) or {}), "turns": given.turns})
    rows = ResultRows(given.results, command, "rows")
    small, model = forms_of(SMELT_6M, given.scratch, calibrated=True), build_billion(given.scratch)
    forms = forms_of(model, given.scratch, calibrated=False)
    pairs = [
        (Pair("bf16, drafted by W4", model, str(forms["w4"])), Pair("", SMELT_6M, str(small["w4"]))),
        (Pair("W4in8, drafted by its upper bits", forms["w4in8"], "nested"), Pair("", small["w4in8"], "nested")),
    ]
    probe = Engine(SMELT_6M, quiet=True)
    text = shared(WIKITEXT_VALIDATION).read_text(encoding="utf-8")[:100000]
    prompts = text_prompts(list(probe.tokenizer(text).input_ids), RECORDED)
    probe.close()
    for pair, of_small in pairs:
        known = acceptance(of_small, prompts)
        for way, divided in WAYS.items():
            if not rows.has(pair=pair.name, way=way):
                found = measure(pair, random_prompts(1), turns=given.turns, forced=known, **divided)
                rows.add({"way": way, **found})


if __name__ == "__main__":
    main()

"""Do the compiled kernels choose other tokens than transformers by anything but rounding?

    python -m benchmarks.cpu.first_choices

First choices at 1600 positions of WikiText-2 by smelt-6m, rounded to each scheme, in bfloat16. Formats that round inputs to 4 bits
make much of a last bit, so the yardstick is transformers beside itself: with another attention, which adds up in another order.
Smelt's torch operators follow transformers' arithmetic and should agree everywhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from smelt.compress import Recipe, run
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.parts.batch import Batch, Run
from smelt.runtime.decoder.parts.operators import Operators
from smelt.runtime.native import library
from smelt.runtime.native.operators import NativeOperators
from smelt.runtime.weights.checkpoint import Checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import REPOSITORY, SMELT_6M, parser, save

TEXT = REPOSITORY.parent / "shared" / "data" / "text" / "wikitext2_test_unk.txt"
SCHEMES = {"NVFP4": {}, "MXFP4": {}, "W4A4": {"group_size": 64}, "W8A8": {}, "W4A16": {"group_size": 64}}
WINDOWS, LENGTH = 16, 100


@torch.inference_mode()
def choices_of_transformers(checkpoint: Path, tokens: Tensor, attention: str) -> Tensor:
    """Its most likely tokens with one implementation of attention."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation=attention)
    return model(tokens).logits.argmax(-1)


@torch.inference_mode()
def choices_of_smelt(checkpoint: Path, tokens: Tensor, operators: Operators) -> Tensor:
    """The runtime's most likely tokens on some operators."""
    model = Model(Checkpoint(checkpoint), operators)
    blocks = -(-LENGTH // 16)
    store = model.keys_values(blocks, 16, model.dtype)
    rows = [Run(row, 0, list(range(blocks)), LENGTH, LENGTH) for row in tokens.tolist()]
    return torch.stack([model(Batch([row], 16), store).argmax(-1) for row in rows])


def main() -> None:
    """Measure, print, and keep."""
    parser(__doc__).parse_args()
    kernels = library.kernels(print)
    if kernels is None:
        raise SystemExit("this machine cannot run the compiled kernels")
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    text = TEXT.read_text(encoding="utf-8")[:60000]
    tokens = torch.tensor(tokenizer(text).input_ids[: WINDOWS * LENGTH]).view(WINDOWS, LENGTH)
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        for scheme, more in SCHEMES.items():
            step = {"quantize": {"scheme": scheme, "rounding": "nearest", **more}}
            recipe = {"model": "builtin:smelt-6m", "output": f"{scratch}/{scheme}", "evaluate": False, "steps": [step]}
            made = run(Recipe.model_validate(recipe), progress=False).checkpoint
            sdpa, eager = (choices_of_transformers(made, tokens, kind) for kind in ("sdpa", "eager"))
            native = choices_of_smelt(made, tokens, NativeOperators(kernels, exact=False))
            plain = choices_of_smelt(made, tokens, Operators(torch.bfloat16))
            pairs = {
                "transformers, sdpa and eager": (sdpa, eager),
                "compiled kernels and sdpa": (native, sdpa),
                "torch operators and sdpa": (plain, sdpa),
            }
            results[scheme] = {name: int((one == other).sum()) for name, (one, other) in pairs.items()}
            print(scheme, results[scheme], flush=True)
    save("first_choices", "python -m benchmarks.cpu.first_choices", results)


if __name__ == "__main__":
    main()

"""LoRA on compressed checkpoints: what is gained by training, and what is left after merging and rounding again.

    python -m benchmarks.quantization.adapters

The builtin smelt-6m, which has read no plays, is compressed by GPTQ on the builtin corpus; an adapter on all linears of
the blocks is trained on the beginning of Shakespeare's plays; perplexities are of their end, in float32.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from smelt.compress import Recipe, for_training, merge, run
from smelt.models.directory.find import find_checkpoint
from smelt.models.structure.lora import Adapter, adapted
from smelt.models.structure.open_model import OpenModel
from smelt.quant.stored.compressed import open_dense
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..common import ResultRows, parser, shared

MODEL = "builtin:smelt-6m"
SCHEMES = ("W4A16", "W3A16", "W2A16")
GROUP, RANK, STEPS, RATE = 64, 16, 300, 1e-3
BATCH, LENGTH = 4, 128
HELD_OUT, WINDOWS, WINDOW = 150_000, 96, 256


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--scheme", choices=SCHEMES, action="append", help="measure only these; others' rows stay")
    asked = options.parse_args().scheme or list(SCHEMES)
    text = shared("data/text/tinyshakespeare.txt").read_text(encoding="utf-8")
    tokenizer = find_checkpoint(MODEL).tokenizer()
    train, test = (torch.tensor(tokenizer(part)["input_ids"]) for part in (text[:-HELD_OUT], text[-HELD_OUT:]))
    windows = test[: WINDOWS * WINDOW].view(WINDOWS, WINDOW)
    rows = ResultRows("adapters", "python -m benchmarks.quantization.adapters")
    rows[:] = [row for row in rows if row["scheme"] not in asked]
    with tempfile.TemporaryDirectory() as scratch:
        plays = Path(scratch) / "plays.txt"
        plays.write_text(text[:-HELD_OUT], encoding="utf-8")
        for scheme in asked:
            rows.add(measured(scheme, train, windows, plays, Path(scratch) / scheme))


def measured(scheme: str, train: Tensor, windows: Tensor, plays: Path, scratch: Path) -> dict[str, Any]:
    """Perplexities of one scheme, from the original to the merged checkpoints."""
    base = compressed(MODEL, scheme, scratch / "base")
    seconds, first, last = trained(base, train, scratch / "adapter")
    done = merge(str(base), scratch / "adapter", scratch / "nearest")
    gptq = compressed(str(base), scheme, scratch / "gptq", adapter=str(scratch / "adapter"))
    own = {"source": str(plays), "samples": 128}
    on_plays = compressed(str(base), scheme, scratch / "plays", adapter=str(scratch / "adapter"), calibrate=own)
    dense = open_dense(find_checkpoint(str(base)))
    models = {
        "original": open_dense(find_checkpoint(MODEL)),
        "compressed": dense,
        "with_adapter": adapted(dense, Adapter(scratch / "adapter")),
        "merged_nearest": open_dense(find_checkpoint(str(scratch / "nearest"))),
        "merged_gptq": open_dense(find_checkpoint(str(gptq))),
        "merged_gptq_on_plays": open_dense(find_checkpoint(str(on_plays))),
    }
    return {
        "scheme": scheme,
        "group_size": GROUP,
        "training_seconds": round(seconds, 1),
        "training_loss": [round(first, 4), round(last, 4)],
        "survived_nearest": done.survived,
        "perplexity": {name: round(perplexity(model, windows), 3) for name, model in models.items()},
    }


def compressed(model: str, scheme: str, output: Path, **top: Any) -> Path:
    """A checkpoint rounded by GPTQ."""
    step = {"scheme": scheme, "group_size": GROUP, "rounding": "gptq"}
    settings = {"model": model, "output": str(output), "evaluate": False, "steps": [{"quantize": step}], **top}
    return run(Recipe.model_validate(settings), progress=False).checkpoint


def trained(base: Path, text: Tensor, output: Path) -> tuple[float, float, float]:
    """Train an adapter: how long it took, and the mean losses of the first and the last twenty steps."""
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(for_training(base, dtype=torch.float32), config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        begins = torch.randint(0, len(text) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([text[begin : begin + LENGTH] for begin in begins])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.save_pretrained(str(output))
    return time.perf_counter() - start, sum(losses[:20]) / 20, sum(losses[-20:]) / 20


@torch.no_grad()
def perplexity(model: OpenModel, windows: Tensor) -> float:
    """Of dense weights, through transformers in float32; no format here rounds inputs."""
    dense = AutoModelForCausalLM.from_pretrained(find_checkpoint(MODEL).path, dtype=torch.float32)
    weights = {name: model.weights.load(key).float() for name, key in model.names.items()}
    dense.load_state_dict(weights, strict=False)
    losses = [dense(input_ids=batch, labels=batch).loss for batch in windows.split(8)]
    return torch.stack(losses).mean().exp().item()


if __name__ == "__main__":
    main()

"""The quantizers of Smelt, llm-compressor, GPTQModel and AutoRound on one model: perplexity, time and peak memory.

    python -m benchmarks.quantization.against_peers --llm-compressor PYTHON --gptqmodel PYTHON --auto-round PYTHON
        [--parts quality|cost|without_text]

Each peer is given by the Python of its environment; those not given are left out. All read the same calibration
windows (256 tokens of C4 each, drawn by each seed), quantize weights alone, symmetrically, and leave the output layer.

``quality``: smelt-6m after 128 windows. One evaluator reads all checkpoints in float32: perplexity of the first 64 x 256
tokens of WikiText-2 test, and the divergence from the unquantized model there. Needs no quiet machine. What a peer could
not do stands as its error.

``cost``: W4 g128 of smelt-6m (128 windows) and of a random Llama that outweighs the libraries (8 windows); medians of
:data:`REPEATS` runs, tools alternating; only on a machine that does nothing else. Smelt's time is that of its whole
run, with tokenization, writing and the reload check, llm-compressor's has writing, those of the others neither. Memory is the
process's peak, whole and above what imports take.

``without_text``: a random Llama of 1.1 billion weights rounded to nearest, which reads no text, by Smelt and llm-compressor
alone, counted as in ``cost``.

Rows that the result's file holds are not measured again, so a run that was cut goes on; delete the file to start over.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from smelt.models.text.text_source import TextSource
from smelt.models.text.windows import calibration_windows, evaluation_windows
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..common import C4, REPOSITORY, SMELT_6M, WIKITEXT_TEST, ResultRows, parser, shared
from ..random_model import BIG, build

COMMAND = "python -m benchmarks.quantization.against_peers --llm-compressor PEER --gptqmodel PEER --auto-round PEER"
LENGTH, SAMPLES, LARGE_SAMPLES, HELD_OUT = 256, 128, 8, 64
FORMATS, SEEDS, REPEATS, LARGE_BLOCKS = ((3, 128), (2, 64)), (0, 1, 2), 5, 24
SCRIPTS = {
    "llm-compressor": "quantize_llm_compressor.py",
    "gptqmodel": "quantize_gptqmodel.py",
    "auto-round": "quantize_autoround.py",
}
# What each tool runs for its quality: its script's method, and further arguments.
PEER_JOBS: dict[str, list[list[str]]] = {
    "llm-compressor": [
        ["rtn"],
        ["gptq"],
        ["awq+rtn"],
        ["awq+gptq"],
        ["spinquant+gptq"],
        ["quip+gptq"],
        ["gptq", "--observer", "memoryless_mse"],
        ["quip+gptq", "--observer", "memoryless_mse"],
    ],
    "gptqmodel": [
        ["rtn"],
        ["gptq"],
        ["gptq-plain"],
        ["gptq-desc-act"],
        ["gptaq"],
        ["foem"],
        ["gptq", "--set", "mse=2.4"],
        ["gptaq", "--set", "mse=2.4"],
    ],
    "auto-round": [
        ["rtn", "--set", "disable_opt_rtn=true"],
        ["rtn"],
        ["signround"],
        ["signround", "--set", "enable_alg_ext=true"],
    ],
}
# Smelt's methods, by the rounding and the transforms before it.
SMELT_JOBS: dict[str, tuple[Any, list[str]]] = {
    "nearest": ("nearest", []),
    "nearest, scales searched": ({"method": "nearest", "scale_search": True}, []),
    "clip + nearest": ("nearest", ["clip"]),
    "hqq": ("hqq", []),
    "gptq": ("gptq", []),
    "gptq, scales not searched": ({"method": "gptq", "scale_search": False}, []),
    "gptq, half error-aware": ({"method": "gptq", "error_aware": 0.5}, []),
    "awq + nearest": ("nearest", ["awq"]),
    "awq + gptq": ("gptq", ["awq"]),
    "rotate + gptq": ("gptq", ["rotate"]),
    "signround": ("signround", []),
}
# Rounding learned in fewer steps than anyone's default. In five steps of the large model it is the memory that says something;
# the time of a step is that of a quarter of its blocks. Windows a step: of eight, Smelt keeps two apart to judge by.
STEPS, BATCH = 50, 8
LARGE_STEPS, LARGE_BATCH = 5, 6
MIDDLE_BLOCKS, MIDDLE_STEPS = 6, 20
BILLION_BLOCKS = 16


@dataclass(frozen=True)
class Bench:
    """Where jobs are run, and the Python of each peer."""

    work: Path
    pythons: dict[str, str]

    def draw(self, samples: int, seed: int) -> None:
        """Write the calibration windows that Smelt draws by ``seed``, for the peers to read."""
        source = TextSource(str(shared(C4)), "calibration")
        drawn = calibration_windows(source, AutoTokenizer.from_pretrained(SMELT_6M), samples, LENGTH, seed)
        save_file({"tokens": drawn.tokens.contiguous()}, self.work / "tokens.safetensors")

    def smelt(self, model: Path, settings: dict[str, Any], samples: int, seed: int) -> dict[str, Any]:
        """Smelt's side of a job, by its recipe."""
        recipe = {
            "model": str(model),
            "output": str(self.work / "quantized"),
            "seed": seed,
            "calibrate": {"source": str(shared(C4)), "samples": samples, "length": LENGTH},
            "steps": [{"quantize": settings}],
            "evaluate": False,
        }
        (self.work / "recipe.yaml").write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "benchmarks.peers.smelt_job", str(self.work / "recipe.yaml")]
        return self._run(command, REPOSITORY, dict(os.environ))

    def peer(self, name: str, model: Path, bits: int, group: int, method: list[str], output: str) -> dict[str, Any]:
        """A peer's side of a job, its result written to ``output``, an argument of its script, if that is given."""
        command = [self.pythons[name], str(Path(__file__).parents[1] / "peers" / SCRIPTS[name]), "--model", str(model)]
        command += ["--tokens", str(self.work / "tokens.safetensors"), "--bits", str(bits), "--group-size", str(group)]
        command += [output, str(self.work / "quantized")] if output else []
        # Peers leave logs where they are started.
        return self._run([*command, "--method", *method], self.work, os.environ | {"PYTHONPATH": ""})

    def _run(self, command: list[str], place: Path, environment: dict[str, str]) -> dict[str, Any]:
        shutil.rmtree(self.work / "quantized", ignore_errors=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=environment)
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def main() -> None:
    options = parser(__doc__)
    for peer in SCRIPTS:
        options.add_argument(f"--{peer}", metavar="PYTHON")
    parts = {"quality": quality, "cost": cost, "without_text": without_text}
    options.add_argument("--parts", nargs="+", choices=[*parts], default=[*parts])
    chosen = options.parse_args()
    pythons = {peer: getattr(chosen, peer.replace("-", "_")) for peer in SCRIPTS}
    with tempfile.TemporaryDirectory(prefix="smelt-peers-") as scratch:
        bench = Bench(Path(scratch), {peer: python for peer, python in pythons.items() if python})
        for part, measure in parts.items():
            rows = ResultRows("against_peers", COMMAND, part)
            for row in measure(bench, rows) if part in chosen.parts else ():
                rows.add(row)


def quality(bench: Bench, known: ResultRows) -> Iterator[dict[str, Any]]:
    """Each tool's methods, at each format, after the windows of each seed."""
    original = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    source, tokenizer = TextSource(str(shared(WIKITEXT_TEST)), "evaluation"), AutoTokenizer.from_pretrained(SMELT_6M)
    held_out = evaluation_windows(source, tokenizer, HELD_OUT, LENGTH).tokens
    if not known:
        losses = [cross_entropy(original(w[None]).logits[0, :-1], w[1:]).item() for w in held_out]
        yield dict.fromkeys(("tool", "method", "bits", "group_size", "seed")) | {
            "tool": "none",
            "perplexity": round(math.exp(statistics.mean(losses)), 3),
        }
    for seed in SEEDS:
        bench.draw(SAMPLES, seed)
        for bits, group in FORMATS:
            at = {"bits": bits, "group_size": group, "seed": seed}
            for method, (rounding, transforms) in SMELT_JOBS.items():
                key = {"tool": "smelt", "method": method, **at}
                if not known.has(**key):
                    settings = {"scheme": f"W{bits}A16", "group_size": group, "rounding": rounding}
                    found = bench.smelt(SMELT_6M, settings | {"transforms": transforms}, SAMPLES, seed)
                    yield key | judged(found, bench.work / "quantized" / "checkpoint", original, held_out)
            for peer in bench.pythons:
                for method in PEER_JOBS[peer]:
                    key = {"tool": peer, "method": " ".join(m for m in method if not m.startswith("--")), **at}
                    if not known.has(**key):
                        found = bench.peer(peer, SMELT_6M, bits, group, method, "--out")
                        yield key | judged(found, bench.work / "quantized", original, held_out)


def judged(found: dict[str, Any], checkpoint: Path, original: Any, held_out: torch.Tensor) -> dict[str, Any]:
    """What a checkpoint loses in float32, read by transformers whoever wrote it; or the job's error."""
    if "error" in found:
        return found
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    losses, divergences = [], []
    with torch.no_grad():
        for window in held_out:
            before, after = (m(window[None], use_cache=False).logits[0].float() for m in (original, model))
            losses.append(cross_entropy(after[:-1], window[1:]))
            logs = (after.log_softmax(-1), before.log_softmax(-1))
            divergences.append(kl_div(*logs, log_target=True, reduction="batchmean"))
    return {
        "perplexity": round(torch.stack(losses).mean().exp().item(), 3),
        "kl": round(torch.stack(divergences).mean().item(), 5),
        **({"versions": found["versions"]} if "versions" in found else {}),
    }


def cost(bench: Bench, known: ResultRows) -> Iterator[dict[str, Any]]:
    """Time and memory of the tools on two models, alternating."""
    large, middle = bench.work / "large", bench.work / "middle"
    size, middle_size = build(large, LARGE_BLOCKS) / 1e6, build(middle, MIDDLE_BLOCKS) / 1e6
    for model, about, samples, jobs in (
        (SMELT_6M, f"smelt-6m, {SAMPLES} x {LENGTH} tokens", SAMPLES, cost_jobs(STEPS, BATCH)),
        (
            large,
            f"random Llama of {size:.0f} MB, {LARGE_SAMPLES} x {LENGTH} tokens",
            LARGE_SAMPLES,
            cost_jobs(LARGE_STEPS, LARGE_BATCH),
        ),
        (
            middle,
            f"random Llama of {middle_size:.0f} MB, {LARGE_SAMPLES} x {LENGTH} tokens",
            LARGE_SAMPLES,
            cost_jobs(MIDDLE_STEPS, LARGE_BATCH)[1:],
        ),
    ):
        bench.draw(samples, 0)
        for method, ours, peers in jobs:
            tools = ["smelt", *(peer for peer in peers if peer in bench.pythons)]
            if known.has(model=about, method=method):
                continue
            runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
            for _ in range(REPEATS):
                for tool in tools:
                    if tool == "smelt":
                        settings = {"scheme": "W4A16", "group_size": 128, "rounding": ours}
                        runs[tool].append(bench.smelt(model, settings, samples, 0))
                    else:
                        output = "--packed" if tool == "llm-compressor" else ""
                        runs[tool].append(in_smelts_terms(bench.peer(tool, model, 4, 128, peers[tool], output)))
            row: dict[str, Any] = {"model": about, "method": method, "repeats": REPEATS}
            yield row | {tool: summed(found) for tool, found in runs.items()}


def without_text(bench: Bench, known: ResultRows) -> Iterator[dict[str, Any]]:
    """Time and memory of rounding by the weights alone, alternating with llm-compressor."""
    model, tools = bench.work / "billion", ["smelt", *(peer for peer in bench.pythons if peer == "llm-compressor")]
    about = f"random Llama of {build(model, BILLION_BLOCKS, BIG) / 1e6:.0f} MB"
    dynamic = ["--activations", "dynamic"]
    for scheme, bits, group, more in (("W4A16", 4, 128, []), ("W8A8", 8, 0, dynamic)):
        if known.has(scheme=scheme, model=about):
            continue
        runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
        for _ in range(REPEATS):
            for tool in tools:
                if tool == "smelt":
                    runs[tool].append(bench.smelt(model, {"scheme": scheme}, SAMPLES, 0))
                else:
                    method = ["rtn", "--without-data", *more]
                    runs[tool].append(in_smelts_terms(bench.peer(tool, model, bits, group, method, "--packed")))
        yield {"model": about, "scheme": scheme, "repeats": REPEATS} | {tool: summed(runs[tool]) for tool in tools}


def cost_jobs(steps: int, batch: int) -> list[tuple[str, Any, dict[str, list[str]]]]:
    """Methods whose cost is compared: their name, our rounding, and what each peer is asked for."""
    return [
        ("gptq", "gptq", {"llm-compressor": ["gptq", "--batch-size", "1"], "gptqmodel": ["gptq-plain"]}),
        (
            f"signround, {steps} steps",
            {"method": "signround", "iterations": steps, "batch": batch},
            {"auto-round": ["signround", "--set", f"iters={steps}", "--batch-size", str(batch)]},
        ),
    ]


def in_smelts_terms(found: dict[str, Any]) -> dict[str, Any]:
    """A peer's time and memory by the names that ``smelt_job`` gives ours; writing counts where it was asked for."""
    if "error" in found:
        return found
    last = "pack" if "pack_seconds" in found else "quantize"
    return {
        "quantize_seconds": round(found["quantize_seconds"] + found.get("pack_seconds", 0), 2),
        "peak_mb": round(found[f"{last}_peak_bytes"] / 2**20, 1),
        "import_mb": round(found["import_peak_bytes"] / 2**20, 1),
        "versions": found["versions"],
    }


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of one tool's runs; or its error."""
    if failed := [run for run in runs if "error" in run]:
        return failed[0]
    return {
        "seconds": [run["quantize_seconds"] for run in runs],
        "seconds_median": statistics.median(run["quantize_seconds"] for run in runs),
        "peak_mb_median": statistics.median(run["peak_mb"] for run in runs),
        "above_imports_mb_median": round(statistics.median(run["peak_mb"] - run["import_mb"] for run in runs), 1),
        **({"versions": runs[0]["versions"]} if "versions" in runs[0] else {}),
    }


if __name__ == "__main__":
    main()

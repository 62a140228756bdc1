"""The same GPTQ jobs by Smelt and by llm-compressor: perplexity, wall time and peak memory, side by side.

    python -m benchmarks.against_llm_compressor --peer-python PEER_ENVIRONMENT/bin/python

Both read the same calibration windows (128 x 256 tokens of C4, drawn by three seeds) and are judged on the
first 64 x 256 tokens of WikiText-2 test in float32. Times and memory are medians of five runs of each,
alternating, with no evaluation: llm-compressor's ``oneshot`` and ``save_pretrained`` against the whole of
Smelt's run, which includes tokenization and the reload check. Memory is given whole and above what the
imports take. Two larger random models show both where the model, not the libraries, takes the memory; the
largest is run once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from smelt.compress import Recipe, run
from smelt.compress.corpus import TextSource, calibration_windows, evaluation_windows
from transformers import AutoTokenizer

from .against_peers import judged
from .common import REPOSITORY, RESULTS, SHARED, save
from .random_model import build

MODEL = REPOSITORY / "compress" / "builtin" / "smelt-6m"
CALIBRATION = SHARED / "data/calib/c4.utf8"
EVALUATION = SHARED / "data/text/wikitext2_test_unk.txt"
NAME = "against_llm_compressor"
COMMAND = "python -m benchmarks.against_llm_compressor --peer-python PEER"
FORMATS = ((4, 128), (3, 128), (2, 64))
SEEDS = (0, 1, 2)
REPEATS = 5
LARGE_BLOCKS, LARGER_BLOCKS, LARGE_WINDOWS = 24, 72, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument(
        "--parts", nargs="+", default=["quality", "cost", "large", "larger"], help="the others keep their saved results"
    )
    chosen = parser.parse_args()
    saved = RESULTS / f"{NAME}.json"
    results: dict[str, Any] = json.loads(saved.read_text())["results"] if saved.exists() else {}
    with tempfile.TemporaryDirectory(prefix="smelt-peer-") as scratch:
        work = Path(scratch)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        if "quality" in chosen.parts:
            held_out = evaluation_windows(TextSource(str(EVALUATION), "evaluation"), tokenizer, 64, 256).tokens
            results["quality"] = [quality(work, chosen.peer_python, tokenizer, held_out, *fmt) for fmt in FORMATS]
            save(NAME, COMMAND, results)
        if "cost" in chosen.parts:
            label = "cost, smelt-6m, W4 g128, 128 x 256 tokens"
            results[label] = cost(work, chosen.peer_python, MODEL, 128, tokenizer, REPEATS)
            save(NAME, COMMAND, results)
        for part, blocks, repeats in (("large", LARGE_BLOCKS, REPEATS), ("larger", LARGER_BLOCKS, 1)):
            if part in chosen.parts:
                size = build(work / part, blocks)
                label = f"cost, random Llama of {size / 1e6:.0f} MB, W4 g128, {LARGE_WINDOWS} x 256 tokens"
                results[label] = cost(work, chosen.peer_python, work / part, LARGE_WINDOWS, tokenizer, repeats)
                save(NAME, COMMAND, results)


def quality(work: Path, peer: str, tokenizer: Any, held_out: torch.Tensor, bits: int, group: int) -> dict[str, Any]:
    """Perplexity of both after the same windows, for every seed."""
    ours, theirs, original = [], [], 0.0
    for seed in SEEDS:
        recipe = recipe_of(work, MODEL, 128, bits, group, seed, evaluate=True)
        before, after = run(Recipe.model_validate(recipe), fresh=True, progress=False).report.as_data()["models"]
        original = before["text"]["perplexity"]
        ours.append(round(after["text"]["perplexity"], 3))
        windows(work, tokenizer, 128, seed)
        run_peer(work, peer, MODEL, bits, group, "--out")
        theirs.append(judged(work / "peer", held_out))
    row = {"bits": bits, "group_size": group, "seeds": list(SEEDS), "original": round(original, 3)}
    row |= {"smelt": ours, "llm_compressor": theirs}
    row |= {"smelt_mean": round(statistics.mean(ours), 3), "llm_compressor_mean": round(statistics.mean(theirs), 3)}
    spread = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs))
    row["standard_error_of_difference"] = round(spread, 3)
    print(json.dumps(row), flush=True)
    return row


def cost(work: Path, peer: str, model: Path, samples: int, tokenizer: Any, repeats: int) -> dict[str, Any]:
    """Time and memory of both, alternating."""
    windows(work, tokenizer, samples, 0)
    (work / "recipe.yaml").write_text(json.dumps(recipe_of(work, model, samples, 4, 128, 0, evaluate=False)))
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_json([sys.executable, "-m", "benchmarks.smelt_gptq_job", str(work / "recipe.yaml")]))
        theirs.append(in_smelts_terms(run_peer(work, peer, model, 4, 128, "--packed")))
    row: dict[str, Any] = {"repeats": repeats}
    for name, runs in (("smelt", ours), ("llm_compressor", theirs)):
        row[name] = {
            "seconds": [r["quantize_seconds"] for r in runs],
            "seconds_median": statistics.median(r["quantize_seconds"] for r in runs),
            "import_seconds_median": statistics.median(r["import_seconds"] for r in runs),
            "peak_mb_median": statistics.median(r["peak_mb"] for r in runs),
            "above_imports_mb_median": statistics.median(r["peak_mb"] - r["import_mb"] for r in runs),
        }
    for key in ("seconds_median", "peak_mb_median", "above_imports_mb_median"):
        row[f"ratio_{key}"] = round(row["smelt"][key] / row["llm_compressor"][key], 3)
    row["llm_compressor"]["versions"] = theirs[0]["versions"]
    print(json.dumps(row), flush=True)
    return row


def recipe_of(
    work: Path, model: Path, samples: int, bits: int, group: int, seed: int, *, evaluate: bool
) -> dict[str, Any]:
    """Smelt's side of a job."""
    return {
        "model": str(model),
        "output": str(work / "smelt"),
        "seed": seed,
        "calibrate": {"source": str(CALIBRATION), "samples": samples, "length": 256},
        "steps": [{"quantize": {"scheme": f"W{bits}A16", "group_size": group, "rounding": "gptq"}}],
        "evaluate": {"text": str(EVALUATION), "windows": 64, "length": 256} if evaluate else False,
    }


def windows(work: Path, tokenizer: Any, samples: int, seed: int) -> None:
    """Write the windows that Smelt draws by ``seed``, for the peer to read."""
    drawn = calibration_windows(TextSource(str(CALIBRATION), "calibration"), tokenizer, samples, 256, seed)
    save_file({"tokens": drawn.tokens.contiguous()}, work / "calibration.safetensors")


def run_peer(work: Path, peer: str, model: Path, bits: int, group: int, output: str) -> dict[str, Any]:
    """llm-compressor's side of a job, in the checkpoint's own dtype, as both tools do by default."""
    shutil.rmtree(work / "peer", ignore_errors=True)
    command = [peer, str(Path(__file__).with_name("peer_llm_compressor.py")), "--model", str(model)]
    command += ["--tokens", str(work / "calibration.safetensors"), output, str(work / "peer")]
    command += ["--method", "gptq", "--bits", str(bits), "--group-size", str(group), "--batch-size", "1"]
    return _json(command)


def in_smelts_terms(result: dict[str, Any]) -> dict[str, Any]:
    """A peer's time and memory with its packed checkpoint written, as ``smelt_gptq_job`` states ours."""
    return {
        "quantize_seconds": round(result["quantize_seconds"] + result["pack_seconds"], 2),
        "import_seconds": result["import_seconds"],
        "peak_mb": round(result["pack_peak_bytes"] / 2**20, 1),
        "import_mb": round(result["import_peak_bytes"] / 2**20, 1),
        "versions": result["versions"],
    }


def _json(command: list[str]) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY) if command[0] == sys.executable else ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    parsed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return parsed


if __name__ == "__main__":
    main()

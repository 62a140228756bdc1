"""The quantizers of Smelt, llm-compressor, GPTQModel and AutoRound on one model: perplexity, time and peak memory.

    python -m benchmarks.against_peers --llm-compressor PYTHON --gptqmodel PYTHON --auto-round PYTHON

Each peer is given by the Python of its environment; those not given are left out. All read the same calibration
windows (128 x 256 tokens of C4, drawn by each seed) and write checkpoints, which one evaluator reads in float32: the
first 64 x 256 tokens of WikiText-2 test. Weights alone are quantized, symmetrically; the output layer is not. A
peer's time leaves out imports, loading and writing; Smelt's is that of its whole run, with writing and the reload
check. Peak memory is that of the process, libraries and all. What a peer could not do stands as its error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from smelt.compress.corpus import TextSource, calibration_windows, evaluation_windows
from transformers import AutoModelForCausalLM, AutoTokenizer

from .common import REPOSITORY, SHARED, save
from .peer_job import perplexity

CALIBRATION = SHARED / "data/calib/c4.utf8"
EVALUATION = SHARED / "data/text/wikitext2_test_unk.txt"
COMMAND = "python -m benchmarks.against_peers --llm-compressor PEER --gptqmodel PEER --auto-round PEER"
SAMPLES, LENGTH, HELD_OUT = 128, 256, 64
SCRIPTS = {
    "llm-compressor": "peer_llm_compressor.py",
    "gptqmodel": "peer_gptqmodel.py",
    "auto-round": "peer_autoround.py",
}
# What each tool runs: its script's method, and further arguments.
PEER_JOBS: dict[str, list[list[str]]] = {
    "llm-compressor": [["rtn"], ["gptq"], ["awq+rtn"], ["awq+gptq"], ["spinquant+gptq"], ["quip+gptq"]],
    "gptqmodel": [["rtn"], ["gptq"], ["gptq-plain"], ["gptq-desc-act"], ["gptaq"], ["foem"]],
    "auto-round": [
        ["rtn", "--set", "disable_opt_rtn=true"],
        ["rtn"],
        ["signround"],
        ["signround", "--set", "enable_alg_ext=true"],
    ],
}
_ERROR_AWARE = {"method": "gptq", "error_aware": 0.5, "refit_groups": True}
# Smelt's methods, by the rounding and the transforms before it.
SMELT_JOBS: dict[str, tuple[Any, list[str]]] = {
    "nearest": ("nearest", []),
    "hqq": ("hqq", []),
    "gptq": ("gptq", []),
    "gptq, error-aware": (_ERROR_AWARE, []),
    "awq + nearest": ("nearest", ["awq"]),
    "awq + gptq": ("gptq", ["awq"]),
    "rotate + gptq": ("gptq", ["rotate"]),
    "signround": ("signround", []),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in SCRIPTS:
        parser.add_argument(f"--{peer}", metavar="PYTHON")
    parser.add_argument("--model", type=Path, default=REPOSITORY / "compress" / "builtin" / "smelt-6m")
    parser.add_argument("--formats", nargs="+", default=["3:128", "2:64"], metavar="BITS:GROUP")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--name", default="against_peers", help="of the results' file")
    chosen = parser.parse_args()
    pythons = {peer: getattr(chosen, peer.replace("-", "_")) for peer in SCRIPTS}
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    held_out = evaluation_windows(TextSource(str(EVALUATION), "evaluation"), tokenizer, HELD_OUT, LENGTH).tokens
    rows: list[dict[str, Any]] = [
        {"tool": "none", "method": "unquantized", "perplexity": judged(chosen.model, held_out)}
    ]
    with tempfile.TemporaryDirectory(prefix="smelt-peers-") as scratch:
        work = Path(scratch)
        for bits, group in ([int(part) for part in text.split(":")] for text in chosen.formats):
            for seed in chosen.seeds:
                source = TextSource(str(CALIBRATION), "calibration")
                drawn = calibration_windows(source, tokenizer, SAMPLES, LENGTH, seed)
                save_file({"tokens": drawn.tokens.contiguous()}, work / "tokens.safetensors")
                about = {"bits": bits, "group_size": group, "seed": seed}
                for tool, method, command in jobs(work, chosen.model, pythons, bits, group, seed):
                    rows.append({"tool": tool, "method": method} | about | measured(command, work, held_out))
                    print(json.dumps(rows[-1]), flush=True)
                    save(chosen.name, COMMAND, rows)


def jobs(
    work: Path, model: Path, pythons: dict[str, str | None], bits: int, group: int, seed: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Tool, method and command of every job at one format."""
    for method, (rounding, transforms) in SMELT_JOBS.items():
        settings = {"scheme": f"W{bits}A16", "group_size": group, "rounding": rounding, "transforms": transforms}
        yield "smelt", method, smelt_command(work, model, settings, seed)
    for peer, python in pythons.items():
        for method, *more in PEER_JOBS[peer] if python else []:
            yield peer, method, [*peer_command(work, model, peer, python, bits, group), "--method", method, *more]


def smelt_command(work: Path, model: Path, settings: dict[str, Any], seed: int) -> list[str]:
    """Smelt's side of a job, by its recipe."""
    recipe = {
        "model": str(model),
        "output": str(work / "quantized"),
        "seed": seed,
        "calibrate": {"source": str(CALIBRATION), "samples": SAMPLES, "length": LENGTH},
        "steps": [{"quantize": settings}],
        "evaluate": False,
    }
    (work / "recipe.yaml").write_text(json.dumps(recipe))
    return [sys.executable, "-m", "benchmarks.smelt_gptq_job", str(work / "recipe.yaml")]


def peer_command(work: Path, model: Path, peer: str, python: str, bits: int, group: int) -> list[str]:
    """A peer's side of a job, without its method."""
    script = Path(__file__).with_name(SCRIPTS[peer])
    command = [python, str(script), "--model", str(model), "--tokens", str(work / "tokens.safetensors")]
    return [*command, "--bits", str(bits), "--group-size", str(group), "--out", str(work / "quantized")]


def measured(command: list[str], work: Path, held_out: torch.Tensor) -> dict[str, Any]:
    """Run a job in a process of its own and judge what it wrote; or its last line, if it failed."""
    shutil.rmtree(work / "quantized", ignore_errors=True)
    ours = command[0] == sys.executable
    # Peers leave logs where they are started.
    place, environment = (REPOSITORY, os.environ) if ours else (work, os.environ | {"PYTHONPATH": ""})
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=environment)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    peak = result["peak_mb"] * 2**20 if ours else result["quantize_peak_bytes"]
    return {
        "settings": result.get("settings", {}),
        "perplexity": judged(work / "quantized" / ("checkpoint" if ours else ""), held_out),
        "seconds": result["quantize_seconds"],
        "peak_bytes": int(peak),
        "versions": result.get("versions", {}),
    }


def judged(checkpoint: Path, held_out: torch.Tensor) -> float:
    """Perplexity of a checkpoint in float32, read by transformers whoever wrote it."""
    return round(perplexity(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), held_out), 3)


if __name__ == "__main__":
    main()

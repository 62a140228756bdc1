"""The runtime on a CPU beside other runtimes, on a Llama of 1.1 billion seeded random weights.

    python -m benchmarks.cpu.beside_others --scratch /var/tmp/smelt-cpu [--peer-python PEER] [--only NAME ...]

Everything runs one after another in processes of their own, each with the machine to itself: Smelt's formats first,
then the peers of benchmarks/peers/runtimes, if a Python that has them is given. Of each the same is measured:

- ``prefill_N``: N random prompt tokens over the time to the first token
- ``decode_N``: the rate of 32 greedy tokens after a prompt of N, without the first
- ``concurrent_32``: 32 requests at once, 128 random tokens in and 32 out: generated tokens over the whole time

The first two are medians of ``--repeats`` after a warm-up, the last of three. ``smelt-6m`` is measured the same way,
beside transformers' ``generate``.

vLLM reads Smelt's own checkpoints, so each format of both is measured in turns, if ``--vllm-python`` names a Python that
has it (`make test-vllm` makes one): both hold the model, their runs alternate, before each round the memory's rate is read,
and what counts are the ratios of neighbours in time (peers/turns.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common import REPOSITORY, SMELT_6M, parser, save, saved
from ..peers.turns import Runtime, answer, in_turns
from ..random_model import build_billion

PEER = "benchmarks.peers.runtimes"
PEERS = ("llama.cpp", "openvino", "openvino-int8", "torchao", "ctranslate2", "transformers")
FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "w4": {"scheme": "W4A16", "ignore": []},
    "w8": {"scheme": "W8A16", "ignore": []},
    "w8a8": {"scheme": "W8A8", "ignore": []},
}
# Formats that vLLM has a kernel for on a CPU, and what is measured in turns: the run, its size, its tokens.
VLLM_FORMATS = ("bf16", "w4", "w8a8")
GENERATED = 32
TURNS = {
    "prefill_512": ("prefill", 512, 512),
    "prefill_1024": ("prefill", 1024, 1024),
    "decode_128": ("decode", 128, GENERATED - 1),
    "decode_1024": ("decode", 1024, GENERATED - 1),
    "concurrent_32": ("concurrent", 32, 32 * GENERATED),
}


def prepare(scratch: Path) -> dict[str, Path]:
    """The model in every format; formats that exist are kept."""
    from smelt.compress import Recipe, run

    found = {"bf16": build_billion(scratch)}
    for name, quantize in FORMATS.items():
        if quantize is not None:
            recipe = {
                "model": str(found["bf16"]),
                "output": str(scratch / name),
                "evaluate": False,
                "steps": [{"quantize": quantize}],
            }
            found[name] = run(Recipe.model_validate(recipe)).checkpoint
    return found


class Smelt:
    """One checkpoint on Smelt's engine, in this process; every run has a new prompt and gives its seconds."""

    def __init__(self, checkpoint: Path, longest: int) -> None:
        from smelt.runtime import Engine

        self.engine = Engine(checkpoint, enable_prefix_caching=False, max_model_len=longest + GENERATED, quiet=True)
        self._seeds = iter(range(10**6))

    def prefill(self, length: int) -> float:
        """To the first token."""
        ids = self._prompt(length)
        return _seconds(lambda: self.engine.generate([ids], _greedy(1)))

    def decode(self, length: int) -> float:
        """From the first token to the last."""
        name = self.engine.add_request(self._prompt(length), _greedy(GENERATED))
        while not self.engine.step():
            pass
        seconds = _seconds(lambda: [self.engine.step() for _ in range(GENERATED - 1)])
        assert not self.engine.is_running(name)
        return seconds

    def concurrent(self, count: int) -> float:
        """Of so many requests at once."""
        prompts = [self._prompt(128) for _ in range(count)]
        return _seconds(lambda: self.engine.generate(prompts, _greedy(GENERATED)))

    def _prompt(self, length: int) -> list[int]:
        generator = torch.Generator().manual_seed(next(self._seeds))
        return torch.randint(4, self.engine.model.spec.vocabulary, (length,), generator=generator).tolist()


def _greedy(count: int) -> Any:
    from smelt.runtime import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


def measure_smelt(checkpoint: Path, repeats: int, lengths: list[int]) -> dict[str, Any]:
    """One checkpoint on Smelt's engine, alone."""
    smelt = Smelt(checkpoint, max(lengths))
    smelt.prefill(lengths[0])
    notes = {"peer": "smelt", "format": checkpoint.name, "notes": "", "kernels": smelt.engine.explain()}
    found: dict[str, Any] = dict(notes)
    for length in lengths:
        found[f"prefill_{length}"] = length / statistics.median(smelt.prefill(length) for _ in range(repeats))
    for length in (128, lengths[-1]):
        smelt.decode(length)
        seconds = statistics.median(smelt.decode(length) for _ in range(repeats))
        found[f"decode_{length}"] = (GENERATED - 1) / seconds
    smelt.concurrent(32)
    found["concurrent_32"] = 32 * GENERATED / statistics.median(smelt.concurrent(32) for _ in range(3))
    found["bytes_per_token"] = smelt.engine.model.bytes_per_token()
    return found


def beside_vllm(checkpoint: Path, python: str, scratch: Path, rounds: int, runs: list[str]) -> dict[str, Any]:
    """One checkpoint on Smelt's engine and on vLLM, in turns."""
    here = [
        sys.executable,
        "-m",
        "benchmarks.cpu.beside_others",
        "--scratch",
        str(scratch),
        "--in-turns",
        str(checkpoint),
    ]
    there = [python, "-m", PEER, "vllm", "--model", str(checkpoint), "--scratch", str(scratch / "peers"), "--in-turns"]
    with Runtime(here, REPOSITORY) as ours, Runtime(there, REPOSITORY) as theirs:
        return in_turns(ours, theirs, {name: TURNS[name] for name in runs}, rounds, lambda: read_rate(3))


def measure_transformers_small(repeats: int) -> float:
    """Tokens a second of transformers' ``generate`` on smelt-6m, at batch 1."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.bfloat16)
    rates = []
    for seed in range(repeats + 1):
        ids = torch.randint(4, 4096, (1, 128), generator=torch.Generator().manual_seed(seed))

        def generate(count: int, ids: torch.Tensor = ids) -> float:
            options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
            return _seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options))

        first = generate(1)
        rates.append((GENERATED - 1) / (generate(GENERATED) - first))
    return statistics.median(rates[1:])


def read_rate(times: int = 10) -> float:
    """Bytes a second that this machine reads, the best of some times."""
    from smelt.system.hardware.pages import in_large_pages

    block = in_large_pages(torch.ones(1 << 27))
    return max(block.nbytes / _seconds(block.sum) for _ in range(times))


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _in_process(*arguments: str, python: str = sys.executable) -> dict[str, Any]:
    done = subprocess.run([python, *arguments], check=False, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        # What is kept says what failed, and not where this machine has it.
        return {"failed": re.sub(r"/\S*/", "", done.stderr.strip().splitlines()[-1])[:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure all, print a table and save it."""
    options = parser(__doc__)
    options.add_argument("--scratch", type=Path, required=True, help="gets 5 GB of models")
    options.add_argument("--peer-python", help="a Python that has the peers")
    options.add_argument("--exporter", default="optimum-cli", help="the optimum-cli of OpenVINO's export")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--only", nargs="*", help="formats and peers to measure; all by default")
    options.add_argument("--vllm-python", help="a Python that has vLLM for CPUs")
    options.add_argument("--results", help="the file's name, for a machine of another kind")
    options.add_argument("--runs", nargs="*", choices=TURNS, default=list(TURNS), help="what is measured beside vLLM")
    options.add_argument("--in-turns", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.in_turns:
        smelt = Smelt(arguments.in_turns, max(size for _, size, _ in TURNS.values()))
        answer({"prefill": smelt.prefill, "decode": smelt.decode, "concurrent": smelt.concurrent})
        return
    if arguments.worker == "read":
        print(json.dumps({"read": read_rate()}))
        return
    if arguments.worker == "small-transformers":
        print(json.dumps({"decode_128": measure_transformers_small(arguments.repeats)}))
        return
    if arguments.worker == "small":
        print(json.dumps(measure_smelt(SMELT_6M, arguments.repeats, [128, 512])))
        return
    if arguments.worker:
        print(json.dumps(measure_smelt(Path(arguments.worker), arguments.repeats, [512, 1024])))
        return
    models = prepare(arguments.scratch)
    beside = [f"vllm {name}" for name in VLLM_FORMATS] if arguments.vllm_python else []
    wanted = arguments.only or ["smelt-6m", *FORMATS, *(PEERS if arguments.peer_python else ()), *beside]
    repeats = ["--repeats", str(arguments.repeats)]
    here = ["-m", "benchmarks.cpu.beside_others", "--scratch", str(arguments.scratch), *repeats, "--worker"]
    # Beside vLLM alone: what the other peers gave is kept.
    usual = "runtime_cpu_vllm" if all(each.startswith("vllm ") for each in wanted) else "runtime_cpu"
    file = arguments.results or usual
    results: dict[str, Any] = saved(file) or {} if arguments.only else {}
    results["machine"] = _in_process(*here, "read")
    threads = ["--threads", str(len(os.sched_getaffinity(0)))]
    for name in wanted:
        if name == "smelt-6m":
            results["smelt-6m"] = _in_process(*here, "small")
            results["smelt-6m transformers"] = _in_process(*here, "small-transformers")
        elif name.startswith("vllm "):
            where, runs = models[name.removeprefix("vllm ")], arguments.runs
            turns = beside_vllm(where, arguments.vllm_python, arguments.scratch, arguments.repeats, runs)
            results[name] = {"turns": turns, **{run: each["theirs"] for run, each in turns.items()}}
            print(turns_table(name, turns))
        elif name in models:
            results[f"smelt {name}"] = _in_process(*here, str(models[name]))
        else:
            where = ["--model", str(models["bf16"]), "--scratch", str(arguments.scratch / "peers")]
            export = ["--exporter", arguments.exporter]
            results[name] = _in_process(
                "-m", PEER, name, *where, *export, *threads, *repeats, python=arguments.peer_python
            )
        print(table(results), flush=True)
        save(file, "python -m benchmarks.cpu.beside_others " + " ".join(_shown(sys.argv[1:])), results)


def turns_table(name: str, turns: dict[str, Any]) -> str:
    """Both rates, their ratios and the memory's rate meanwhile."""
    lines = [f"{name + ', in turns':<24}{'smelt':>10}{'vllm':>10}{'ratio':>8}   least to most   memory read, GB/s"]
    for run, each in turns.items():
        ratios, read = each["ratios"], [rate / 1e9 for rate in each["read"]]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(
            f"{run:<24}{each['ours']:>10.1f}{each['theirs']:>10.1f}{each['ratio']:>8.2f}   {spread:<13}"
            f"   {min(read):.0f} to {max(read):.0f}"
        )
    return "\n".join(lines)


def _shown(arguments: list[str]) -> list[str]:
    """The command line without this machine's paths."""
    return [Path(a).name.upper() if "/" in a else a for a in arguments]


def table(results: dict[str, Any]) -> str:
    """The rates side by side."""
    columns = ("prefill_512", "prefill_1024", "decode_128", "decode_1024", "concurrent_32")
    lines = [f"{'tokens/s':<24}" + "".join(f"{c:>15}" for c in columns)]
    for name, found in results.items():
        if name == "machine":
            lines.insert(0, f"this machine reads {found['read'] / 1e9:.1f} GB/s")
            continue
        cells = [f"{found[c]:>15.1f}" if found.get(c) else f"{'-':>15}" for c in columns]
        lines.append(f"{name:<24}" + "".join(cells) + (f"  {found['failed']}" if "failed" in found else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    main()

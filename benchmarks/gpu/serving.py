"""Part five: 256 ragged requests on the engine, on its own static batching, and on transformers' continuous batching."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from smelt.runtime.kernels.timing import device_lives
from smelt.runtime.workload import Arrival, random_prompt

from .common import REPOSITORY, needed, one_line, options, save, told
from .random_checkpoints import LLAMA, QWEN, Size, write

if TYPE_CHECKING:
    from smelt.runtime import RequestOutput

LIMIT_S = 530  # of the ten minutes that a call may take
REQUESTS, SHORTEST, LONGEST = 256, 100, 1000
SLOTS = 64  # of a static batch, and of what it is compared with
ENGINE, WITH_SLOTS, STATIC = "engine", f"engine, {SLOTS} at once", f"static batching, {SLOTS} at once"
TRANSFORMERS = "transformers generate_batch"
_RUNS = {
    ENGINE: {"max_sequences": REQUESTS},
    WITH_SLOTS: {"max_sequences": SLOTS},
    STATIC: {"max_sequences": SLOTS, "static_batching": True},
}


@dataclass(frozen=True)
class Row:
    """One way to serve all requests.

    Attributes:
        model, method: what was measured.
        requests: how many.
        seconds: from the first's arrival, when all are there, to the last token; None if it was not measured.
        rate: generated tokens a second.
        note: what else is to be known; for what was not measured, why.
    """

    model: str
    method: str
    requests: int
    seconds: float | None = None
    rate: float | None = None
    note: str = ""


def main() -> None:
    """Measure, print the table and the goals, save."""
    if len(sys.argv) == 5 and sys.argv[1] == "--transformers":
        print(json.dumps(asdict(by_transformers(Path(sys.argv[2]), sys.argv[3], ragged(int(sys.argv[4])), "cuda"))))
        return
    given = options(__doc__ or "")
    needed("transformers", "compressed_tensors", "psutil")
    begun, rows, reason = time.monotonic(), list[Row](), ""
    arrivals = ragged(REQUESTS // 8 if given.quick else REQUESTS)
    most = bound(arrivals, SLOTS)
    with tempfile.TemporaryDirectory(dir=given.scratch) as folder:
        for size in (QWEN,) if given.quick else (QWEN, LLAMA):
            path = None
            for method in (ENGINE, TRANSFORMERS, STATIC, WITH_SLOTS):
                left = LIMIT_S - (time.monotonic() - begun)
                row = Row(size.name, method, len(arrivals), note=reason)
                if not reason and left < _needed(rows, size):
                    row = Row(size.name, method, len(arrivals), note="out of time")
                elif not reason:
                    path = path or write(Path(folder), size, "bf16", torch.device("cuda"))
                    row = _measured(path, size, method, arrivals, left)
                rows.append(row)
                print(line(row), flush=True)
                results = {"bound_of_static": most, "rows": [asdict(r) for r in rows], "goals": _goals(rows)}
                saved = save(given, "serving", results)
                if not reason and not device_lives():
                    reason = "the device had stopped"
    told(_goals(rows))
    print(
        f"\nA static batch of {SLOTS} takes as many steps as its longest request: at equal slots and times of steps"
        f" nothing is more than {most:.2f} times as fast."
    )
    print(f"{time.monotonic() - begun:.0f} s: {saved}")


def _needed(rows: list[Row], size: Size) -> float:
    """Seconds without which nothing is begun: to load, and for the slowest of our ways."""
    mine = next((row.seconds for row in rows if row.model == size.name and row.method == ENGINE), None)
    return 40 + 4 * (mine or 0.0)


def ragged(count: int) -> list[Arrival]:
    """Requests that are all there at once, with prompts and outputs of 100 to 1000 tokens."""
    draw = torch.Generator().manual_seed(11)
    sizes = torch.randint(SHORTEST, LONGEST + 1, (count, 2), generator=draw).tolist()
    return [Arrival(0.0, prompt, output) for prompt, output in sizes]


def bound(arrivals: list[Arrival], slots: int) -> float:
    """How many steps static batches take, for each that ever full slots would."""
    outputs = [arrival.output for arrival in arrivals]
    longest = sum(max(outputs[i : i + slots]) for i in range(0, len(outputs), slots))
    return longest / max(sum(outputs) / slots, *outputs)


def _measured(path: Path, size: Size, method: str, arrivals: list[Arrival], left: float) -> Row:
    try:
        if method == TRANSFORMERS:
            return _in_process(path, size.name, arrivals, left)
        return by_engine(path, size.name, method, arrivals, "cuda")
    except Exception as error:
        return Row(size.name, method, len(arrivals), note=one_line(error))
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def by_engine(path: Path, model: str, method: str, arrivals: list[Arrival], device: str) -> Row:
    """All requests on an engine that is warm."""
    from smelt.runtime import Engine
    from smelt.runtime.bench import run_load

    engine = Engine(
        path,
        device=device,
        max_length=2 * LONGEST + 1,
        token_budget=2048,
        share_prefixes=False,
        quiet=True,
        **_RUNS[method],
    )
    run_load(engine, "warm up", [Arrival(0, SHORTEST, 8)] * 4, None, seed=1)
    most, step = 0, engine.step

    def watched() -> list[RequestOutput]:
        nonlocal most
        found = step()
        most = max(most, len(engine.scheduler.running))
        return found

    engine.step = watched  # type: ignore[method-assign]
    load = run_load(engine, method, arrivals, None, seed=1000)
    assert most == min(len(arrivals), _RUNS[method]["max_sequences"]), f"only {most} ran at once"
    assert load.output_tokens == sum(arrival.output for arrival in arrivals)
    return Row(model, method, len(arrivals), load.seconds, load.output_rate)


def _in_process(path: Path, model: str, arrivals: list[Arrival], left: float) -> Row:
    """In a process of its own, which is stopped when it takes more than half of the time that is left."""
    command = [sys.executable, "-m", "benchmarks.gpu.serving", "--transformers", str(path), model, str(len(arrivals))]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=left / 2, check=False)
    except subprocess.TimeoutExpired:
        seconds = time.monotonic() - begun
        note = f"stopped unfinished after {seconds:.0f} s, loading included"
        return Row(model, TRANSFORMERS, len(arrivals), note=note)
    if done.returncode:
        return Row(model, TRANSFORMERS, len(arrivals), note=(done.stderr.strip().splitlines() or ["failed"])[-1][:200])
    return Row(**json.loads(done.stdout.strip().splitlines()[-1]))


def by_transformers(path: Path, model: str, arrivals: list[Arrival], device: str) -> Row:
    """All requests on transformers' continuous batching, which is warmed up before, with its own choice of options."""
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded = loaded.to(device)
    generation = GenerationConfig(max_new_tokens=LONGEST, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False)
    # As generate_batch does, which knows one length for all outputs.
    hints = WorkloadHints(max_prompt_length=LONGEST, max_generated_length=LONGEST, num_requests=len(arrivals))
    vocabulary = loaded.config.vocab_size
    prompts = [random_prompt(arrival.prompt, vocabulary, 1000 + i) for i, arrival in enumerate(arrivals)]
    with loaded.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, workload_hints=hints
    ) as manager:
        manager.add_request(random_prompt(SHORTEST, vocabulary, 1), max_new_tokens=8)
        _finished(manager, 1)
        begun = time.perf_counter()
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            manager.add_request(prompt, max_new_tokens=arrival.output)
        tokens = _finished(manager, len(arrivals))
        seconds = time.perf_counter() - begun
        attention = loaded.config._attn_implementation
    assert tokens == sum(arrival.output for arrival in arrivals), f"{tokens} tokens came"
    note = f"transformers {transformers.__version__}, attention: {attention}"
    return Row(model, TRANSFORMERS, len(arrivals), seconds, tokens / seconds, note)


def _finished(manager: Any, count: int) -> int:
    """Waits for so many requests; their tokens."""
    tokens = 0
    while count:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' batching stopped by itself")
        elif result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            tokens += len(result.generated_tokens)
            count -= 1
    return tokens


def _goals(rows: list[Row]) -> list[dict[str, Any]]:
    """The goals for an H100."""
    rate = {(r.model, r.method): r.rate for r in rows if r.rate}

    def ratio(model: str, one: str, other: str) -> float | None:
        mine, theirs = rate.get((model, one)), rate.get((model, other))
        return mine / theirs if mine and theirs else None

    # Without flash attention transformers uses neither graphs nor steps ahead.
    attention = next((row.note.rpartition(" ")[2] for row in rows if row.method == TRANSFORMERS and row.rate), "none")
    return [
        {"goal": f"{size.name}: {goal}", "wanted": wanted, "reached": ratio(size.name, one, other)}
        for size in (QWEN, LLAMA)
        for goal, wanted, one, other in (
            (f"times transformers' generate_batch ({attention})", 3.0, ENGINE, TRANSFORMERS),
            ("times static batching", 2.0, ENGINE, STATIC),
            (f"times static batching, both {SLOTS} at once", 2.0, WITH_SLOTS, STATIC),
        )
    ]


def line(row: Row) -> str:
    """For the terminal."""
    head = f"{row.model:<14}{row.method:<36}"
    if row.rate is None:
        return f"{head} not measured: {row.note}"
    return f"{head}{row.rate:>9.0f} tok/s{row.seconds:>8.1f} s  {row.note}"


if __name__ == "__main__":
    main()

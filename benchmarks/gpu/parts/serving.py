"""256 ragged requests on the engine, on its own static batching, and on transformers' continuous batching."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from smelt.runtime.measure.workload import random_prompt
from smelt.runtime.requests.trace import Arrival

from ..job import Job, Row
from ..place import Place
from ..random_checkpoints import LLAMA, QWEN, TINY, CheckpointSize, once

if TYPE_CHECKING:
    from smelt.runtime import RequestOutput

IMPORTS = ("transformers", "compressed_tensors", "pydantic", "loguru", "psutil", "smelt.runtime")
REQUESTS, SHORTEST, LONGEST = 256, 100, 1000
SLOTS = 64  # of a static batch, and of what it is compared with
ENGINE, WITH_SLOTS, STATIC = "engine", f"engine, {SLOTS} at once", f"static batching, {SLOTS} at once"
TRANSFORMERS = "transformers generate_batch"
_RUNS = {
    ENGINE: {"max_num_seqs": REQUESTS},
    WITH_SLOTS: {"max_num_seqs": SLOTS},
    STATIC: {"max_num_seqs": SLOTS, "policy": "static"},
}


def jobs(place: Place) -> list[Job]:
    """Each way for each model; the peer last, which once did not finish within a minute."""
    sizes = (TINY,) if place.rehearses else (QWEN,) if place.quick else (QWEN, LLAMA)
    pairs = [(size, method) for size in sizes for method in (ENGINE, STATIC, WITH_SLOTS)]
    pairs += [(size, TRANSFORMERS) for size in sizes]
    count, shortest, longest = REQUESTS, SHORTEST, LONGEST
    if place.rehearses:
        count, shortest, longest = 3, 2, 5
    elif place.quick:
        count = REQUESTS // 8
    return [
        Job(
            f"{method}, {size.name}",
            partial(_served, size, method, ragged(count, shortest, longest)),
            {"model": size.name, "method": method, "requests": count},
            limit_s=220,
            fresh=True,
        )
        for size, method in pairs
    ]


def ragged(count: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[Arrival]:
    """Requests that are all there at once, with prompts and outputs of 100 to 1000 tokens."""
    draw = torch.Generator().manual_seed(11)
    sizes = torch.randint(shortest, longest + 1, (count, 2), generator=draw).tolist()
    return [Arrival(0.0, prompt, output) for prompt, output in sizes]


def bound(arrivals: list[Arrival], slots: int) -> float:
    """How many steps static batches take, for each that ever full slots would."""
    outputs = [arrival.output for arrival in arrivals]
    longest = sum(max(outputs[i : i + slots]) for i in range(0, len(outputs), slots))
    return longest / max(sum(outputs) / slots, *outputs)


def _served(size: CheckpointSize, method: str, arrivals: list[Arrival], place: Place) -> Iterator[Row]:
    path = once(place.scratch, size, "bf16", place.device)
    if method == TRANSFORMERS:
        yield by_transformers(path, arrivals, place.device)
    else:
        yield by_engine(path, method, arrivals, place)


def by_engine(path: Path, method: str, arrivals: list[Arrival], place: Place) -> Row:
    """All requests on an engine that is warm."""
    from smelt.runtime.measure.bench import run_load

    longest = max(arrival.prompt + arrival.output for arrival in arrivals)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20} if place.rehearses else {}
    slots = min(int(_RUNS[method]["max_num_seqs"]), len(arrivals))
    engine = place.engine(
        path,
        max_model_len=longest + 1,
        max_num_batched_tokens=64 if place.rehearses else 2048,
        enable_prefix_caching=False,
        **{**_RUNS[method], **options, "max_num_seqs": slots},
    )
    run_load(engine, "warm up", [Arrival(0, min(a.prompt for a in arrivals), 4)] * min(4, slots), None, seed=1)
    most, step = 0, engine.step

    def watched() -> list[RequestOutput]:
        nonlocal most
        found = step()
        most = max(most, len(engine.scheduler.running))
        return found

    engine.step = watched  # type: ignore[method-assign]
    load = run_load(engine, method, arrivals, None, seed=1000)
    assert most == slots, f"only {most} ran at once"
    assert load.output_tokens == sum(arrival.output for arrival in arrivals)
    # At equal slots and times of steps no way of batching is more than so many times as fast as static batches.
    return {"seconds": load.seconds, "tokens_per_s": load.output_rate, "bound_over_static": bound(arrivals, SLOTS)}


def by_transformers(path: Path, arrivals: list[Arrival], device: torch.device) -> Row:
    """All requests on transformers' continuous batching, which is warmed up before, with its own choice of options."""
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    loaded = loaded.to(device)
    longest = max(max(arrival.prompt, arrival.output) for arrival in arrivals)
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(allow_block_sharing=False)
    # As generate_batch does, which knows one length for all outputs.
    hints = WorkloadHints(max_prompt_length=longest, max_generated_length=longest, num_requests=len(arrivals))
    vocabulary = loaded.config.vocab_size
    prompts = [random_prompt(arrival.prompt, vocabulary, 1000 + i) for i, arrival in enumerate(arrivals)]
    with loaded.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, workload_hints=hints
    ) as manager:
        manager.add_request(random_prompt(arrivals[0].prompt, vocabulary, 1), max_new_tokens=4)
        _finished(manager, 1)
        begun = time.perf_counter()
        for prompt, arrival in zip(prompts, arrivals, strict=True):
            manager.add_request(prompt, max_new_tokens=arrival.output)
        tokens = _finished(manager, len(arrivals))
        seconds = time.perf_counter() - begun
        attention = loaded.config._attn_implementation
    assert tokens == sum(arrival.output for arrival in arrivals), f"{tokens} tokens came"
    # Without flash attention transformers uses neither graphs nor steps ahead.
    note = f"transformers {transformers.__version__}, attention: {attention}"
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "note": note}


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

"""The whole engine on the device: logits against transformers there, every cache type, graphs against no graphs.

transformers computes in float32 from the same weights, restored by arithmetic of our own. How far it is from itself in
bfloat16 is the measure of what the kernels may differ by.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..job import Job, Row
from ..place import Place
from ..random_checkpoints import LLAMA, QWEN, TINY, TINY_LLAMA, CheckpointSize, dense, write

IMPORTS = ("transformers", "compressed_tensors", "pydantic", "loguru", "psutil", "smelt.runtime")
# What rounding keys and values may add to logits' distance from transformers; and where two ways of computing read the same
# codes, what those codes add that differ because the ways do.
_CACHES = {"auto": (0.0, 0.0), "int8": (0.03, 0.01), "fp8": (0.06, 0.02), "int4": (0.35, 0.05)}
_BLOCK = 16
WORKERS = 5  # nothing is timed; most of a job is reading and writing weights


def jobs(place: Place) -> list[Job]:
    """Logits first, then the engine's own loop."""
    # A few blocks of Llama's widths say as much of its kernels as all.
    sizes = (TINY, TINY_LLAMA) if place.rehearses else (QWEN, replace(LLAMA, name="Llama-3-8B, 2 layers", layers=2))
    stored = ("bf16", "w4a16", "fp8")
    found = [
        Job(f"logits of {size.name}, {form}", partial(_logits, size, form), limit_s=150, fresh=True)
        for form in stored
        for size in (sizes[:1] if place.rehearses and form != "bf16" else sizes)
    ]
    found += [
        Job(f"graphs of {sizes[0].name}, {form}, {kept} cache", partial(_graphs, sizes[0], form, kept), limit_s=120)
        for form, kept in (("bf16", "auto"), ("w4a16", "int4"), ("fp8", "fp8"), ("bf16", "int8"))
    ]
    return found[::3] if place.quick else found


@contextmanager
def written(place: Place, size: CheckpointSize, stored: str) -> Iterator[Path]:
    """A random checkpoint, for as long as it is needed."""
    with tempfile.TemporaryDirectory(dir=place.scratch) as folder:
        yield write(Path(folder), size, stored, place.device)


def _logits(size: CheckpointSize, stored: str, place: Place) -> Iterator[Row]:
    from smelt.runtime.decoder.model import Model
    from smelt.runtime.fusions import Fusions
    from smelt.runtime.gpu import GpuOperators
    from smelt.runtime.weights.checkpoint import Checkpoint

    caches = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.int4}  # pyright: ignore[reportAttributeAccessIssue]
    draw = torch.Generator().manual_seed(5)
    batches = (1, 2) if place.rehearses else (1, 8, 64)
    # A few long ones: logits of 64 would take as much memory as the model.
    longest = [12] * 2 if place.rehearses else [300] * 8 + [40] * 56
    lengths = [int(torch.randint(most // 2, most + 1, (), generator=draw)) for most in longest]
    prompts = [torch.randint(size.vocabulary, (length,), generator=draw).tolist() for length in lengths]
    with written(place, size, stored) as path:
        exact, own = _by_transformers(path, stored, prompts, place)
        model = Model(Checkpoint(path), GpuOperators(torch.bfloat16, place.device))
        plain = Model(Checkpoint(path), GpuOperators(torch.bfloat16, place.device, Fusions().without(*Fusions.names())))
    error = _apart(own, exact)
    yield {"transformers bfloat16 from float32": error}
    for batch in batches:
        found = _in_pieces(model, prompts[:batch], model.dtype, place)
        yield _row(f"{batch} sequences", _apart(found, exact[:batch]), 2 * error)
    some = prompts[: batches[1]]
    exact = exact[: batches[1]]
    for name, (from_exact, from_plain) in _CACHES.items():
        kept = model.kept(caches.get(name, model.dtype))
        found = _in_pieces(model, some, kept, place)
        yield _row(f"{name} cache", _apart(found, exact), 2 * error + from_exact)
        # The same codes, read and attended to by torch, one operator after another.
        apart = _apart(found, _in_pieces(plain, some, kept, place))
        yield _row(f"{name} cache, against torch's operators on the same codes", apart, 3 * error + from_plain)


def _row(what: str, error: float, allowed: float) -> Row:
    wrong = not error <= allowed  # nor is a NaN
    problem = f"{what}: logits are {error:.1e} away, {allowed:.1e} allowed" if wrong else None
    return {"what": what, "error": error, "allowed": allowed, "problem": problem}


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance of a sequence's logits, relative to their size."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


@torch.inference_mode()
def _by_transformers(
    path: Path, stored: str, prompts: list[list[int]], place: Place
) -> tuple[list[Tensor], list[Tensor]]:
    """Logits in float32 and in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(path)
    config.__dict__.pop("quantization_config", None)
    with place.device:  # random weights, which come first, are drawn there in no time
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(dense(path), strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in name for name in missing), missing  # which is tied
    model.tie_weights()
    model.eval()
    if stored == "fp8":
        for name, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and name != "lm_head":
                linear.register_forward_pre_hook(lambda _, given: (_as_e4m3(given[0]),))

    def logits() -> list[Tensor]:
        return [model(torch.tensor([prompt], device=place.device)).logits[0] for prompt in prompts]

    model.to(place.device)
    exact = logits()
    model.to(torch.bfloat16)
    return exact, logits()


def _as_e4m3(x: Tensor) -> Tensor:
    """Inputs rounded by token, as FP8_DYNAMIC rounds them."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


@torch.inference_mode()
def _in_pieces(model: Any, prompts: list[list[int]], kept: torch.dtype, place: Place) -> list[Tensor]:
    """Each prompt's logits: its first half in one step, most of the rest in another, then single tokens, side by side."""
    from smelt.runtime.decoder.parts.batch import Batch, Run
    from smelt.runtime.kernels.base.precompile import precompile_work

    needed = [-(-len(prompt) // _BLOCK) for prompt in prompts]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = [[order.pop() for _ in range(count)] for count in needed]
    found: list[list[Tensor]] = [[] for _ in prompts]
    with place.device:
        store = model.keys_values(sum(needed), _BLOCK, kept)
        cuts = [(0, len(p) // 2, len(p) - 3, len(p) - 2, len(p) - 1, len(p)) for p in prompts]
        steps = [
            [
                Run(prompt[cut[i] : cut[i + 1]], cut[i], mine, len(prompt), cut[i + 1] - cut[i])
                for prompt, cut, mine in zip(prompts, cuts, blocks, strict=True)
            ]
            for i in range(5)
        ]
        if not place.rehearses:  # on all processors, as an engine does when it starts
            precompile_work([partial(model, Batch(runs, _BLOCK), store) for runs in steps], print)
        for runs in steps:
            logits = model(Batch(runs, _BLOCK), store)
            for which, part in enumerate(logits.split([len(run.tokens) for run in runs])):
                found[which].append(part)
    return [torch.cat(parts) for parts in found]


def _graphs(size: CheckpointSize, stored: str, kept: str, place: Place) -> Iterator[Row]:
    """Tokens and log probabilities of an engine that replays graphs, and of one that launches each kernel: the same bits."""
    from smelt.runtime import SamplingParams
    from smelt.runtime.fusions import Fusions

    batches, tokens, longest, budget = (1, 8, 64), 24, 500, 256
    if place.rehearses:
        batches, tokens, longest, budget = (1, 2), 3, 12, 8
    draw = torch.Generator().manual_seed(7)
    found: dict[int, list[list[tuple[Any, ...]]]] = {batch: [] for batch in batches}
    lengths = torch.randint(3, longest, (batches[-1],), generator=draw).tolist()
    prompts = [torch.randint(size.vocabulary, (length,), generator=draw).tolist() for length in lengths]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=1)
    with written(place, size, stored) as path:
        for fusions in (Fusions(), Fusions().without("graphs")):
            engine = place.engine(
                path,
                kv_cache_dtype=kept,
                max_num_seqs=batches[-1],
                max_model_len=longest + tokens,
                max_num_batched_tokens=budget,
                kv_cache_memory_bytes=(64 << 20) if place.rehearses else (4 << 30),
                enable_prefix_caching=False,
                fusions=fusions,
            )
            for batch in batches:
                outputs = engine.generate(prompts[:batch], params)
                found[batch].append([_outcome(output) for output in outputs])
            del engine
    for batch, (replayed, launched) in found.items():
        differing = sum(one != other for one, other in zip(replayed, launched, strict=True))
        errors = sum(one[0] is not None for one in replayed)
        problem = f"{differing} of {batch} sequences are others without graphs" if differing else None
        yield {"sequences": batch, "problem": f"{errors} requests failed" if errors else problem}


def _outcome(output: Any) -> tuple[Any, ...]:
    done = output.outputs[0]
    return output.error, done.token_ids, done.cumulative_logprob

"""What a GPU will be asked, carried out on a machine that has none: all Python of a launch, and the compiler for sm_90.

A process of its own, because Triton's interpreter must be off:

    python -m tests.runtime.kernels.rehearsal cases [--all]
    python -m tests.runtime.kernels.rehearsal steps [--all]

Results mean nothing; what counts is that no Python error is left.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.fusions import Fusions
from smelt.runtime.kernels.base.kernel import Case
from smelt.runtime.kernels.base.precompile import precompile
from smelt.runtime.kernels.base.targets import TARGETS
from smelt.runtime.kernels.tools.registry import KERNELS
from transformers import AutoModelForCausalLM

from ...tiny import make_model, save_model
from ..speculation.head_reference import ReferenceHead
from .mock_device import CUDA, Drawing, mock_device
from .mock_driver import MockDriver

TARGET = TARGETS["sm_90"]
_TOKEN = 7  # what is "chosen"
_HEAD = "a draft head"
_DRAFTERS: list[dict[str, Any]] = [
    {"drafter": "lookup", "draft_tokens": 3},
    {"drafter": "early-exit:1"},
    {"drafter": _HEAD, "draft_tokens": 2},
    {"drafter": "nested", "draft_tokens": 2},
    {"drafter": "nested", "draft_tokens": 2, "draft_branches": 2, "upper_bits_at": 1},
]
_MODELS = [(name, scheme) for name in ("llama", "qwen3") for scheme in ("", "W4A16", "W8A8", "FP8_DYNAMIC")]


def rehearse_cases(driver: MockDriver, every: int) -> list[str]:
    """Each kernel's cases, small and large, as ``benchmarks/gpu`` runs them.

    Args:
        driver: launches them.
        every: take only each so-many-th case of a kernel.

    Returns:
        What failed.
    """
    failures = []
    for kernel in KERNELS:
        mine = [case for case in kernel.cases if not case.targets or TARGET.name in case.targets]
        chosen = [case for large in (False, True) for case in [c for c in mine if c.large == large][::every]]
        messages: list[str] = []
        precompile([case.launch(TARGET) for case in chosen if case.launch], messages.append)
        failures += [f"{kernel.name}: {line}" for line in messages if "did not compile" in line]
        for case in chosen:
            before = len(driver.launched)
            wrong = _failure(lambda case=case: _carry_out(case))
            if wrong is None and len(driver.launched) == before:
                wrong = "launched nothing"
            if wrong:
                failures.append(f"{kernel.name}, {case.name}: {wrong}")
    return failures


def _carry_out(case: Case) -> None:
    if case.large and case.launch:
        # On `meta`: its weights and the reference would take gigabytes and minutes.
        case.launch(TARGET).run()
        return
    trial = case.prepare(CUDA, Drawing().manual_seed(0))
    found = trial.compute()
    assert found.shape == trial.expected.shape, f"{found.shape} are compared with {trial.expected.shape}"
    assert found.device == trial.expected.device == CUDA


def rehearse_steps(driver: MockDriver, models: Sequence[tuple[str, str]], folder: Path) -> list[str]:
    """Whole engines: compile ahead, capture all kinds of steps, compute a few.

    Args:
        driver: launches them.
        models: architectures and schemes.
        folder: for the models.

    Returns:
        What failed.
    """
    failures = []
    driver.seen = choose
    for architecture, scheme in models:
        path = _model(architecture, scheme, folder / f"{architecture} {scheme}".strip())
        for kept in ("auto", "int4") if not scheme else ("auto",):
            wrong = _failure(lambda path=path, kept=kept: _generate(path, kept))
            if wrong:
                failures.append(f"{architecture} {scheme}, keys and values in {kept}: {wrong}")
    return failures


def _rehearse_drafts(folder: Path, drafters: Sequence[dict[str, Any]]) -> list[str]:
    """Engines with drafters; trees and the upper bits' answers are computed and chosen as the host asks for."""
    path = _model("llama", "W4in8", folder / "drafts")
    model = AutoModelForCausalLM.from_pretrained(folder / "drafts" / "model", dtype=torch.bfloat16)
    head = ReferenceHead(model, after=(1, 1, 2), norms_each=True, norms_outputs=True).save(
        folder / "head", torch.bfloat16
    )
    failures = []
    for options in drafters:
        if options["drafter"] == _HEAD:
            options = {**options, "drafter": str(head)}
        # Those whose tokens the host chooses get what it makes of logits without values.
        choosing = "draft_branches" not in options
        wrong = _failure(
            lambda options=options, choosing=choosing: _generate(path, "auto", choosing=choosing, **options)
        )
        if wrong:
            failures.append(f"{options}: {wrong}")
    return failures


def _rehearse_alone(driver: MockDriver, path: Path) -> list[str]:
    """The engine's switch must reach every launch."""
    driver.overlapped.clear()
    wrong = _failure(lambda: _generate(path, "auto", Fusions().without("overlap")))
    if wrong is None and any(driver.overlapped):
        wrong = f"{sum(driver.overlapped)} of {len(driver.overlapped)} launches overlap"
    return [f"llama without overlap: {wrong}"] if wrong else []


def _model(architecture: str, scheme: str, folder: Path) -> Path:
    folder.mkdir()
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    path = save_model(make_model(architecture, torch.bfloat16, **sizes), folder / "model")
    if not scheme:
        return path
    recipe = {
        "model": str(path),
        "output": str(folder / "out"),
        "calibrate": {"samples": 2, "length": 16},
        "evaluate": False,
        "steps": [{"quantize": {"scheme": scheme, "rounding": "nearest"}}],
    }
    return Path(run(Recipe.model_validate(recipe), progress=False).checkpoint)


def _generate(path: Path, kept: str, fusions: Fusions | None = None, *, choosing: bool = True, **options: Any) -> None:
    """A prompt alone, prompts in pieces beside single tokens, single tokens; greedy and drawn."""
    prompts = [[5, 6, 7, 8, 9], [5] * 40, [6], [7] * 17]
    params = [
        SamplingParams(max_tokens=5, temperature=heat, ignore_eos=True, logprobs=wanted)
        for heat, wanted in ((0, None), (1.0, 2), (0, 0), (0.7, None))
    ]
    with mock_device():
        engine = Engine(
            path,
            device="cuda",
            dtype="bfloat16",
            kv_cache_dtype=kept,
            max_num_seqs=2,
            max_num_batched_tokens=24,
            max_model_len=64,
            fusions=fusions,
            quiet=True,
            **options,
        )
        for output in engine.generate(prompts, params):
            assert output.error is None, output.error
            tokens = output.outputs[0].token_ids
            assert tokens == [_TOKEN] * 5 or (not choosing and len(tokens) == 5), tokens


def choose(name: str, arguments: dict[str, Any]) -> None:
    """Stands for the one kernel whose results the host looks at."""
    if name == "choose_tokens":
        arguments["tokens"].fill_(_TOKEN)
        arguments["sound"].fill_(1)


def _failure(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    """Carry it out, and say what was launched and what failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["cases", "steps"])
    parser.add_argument("--all", action="store_true")
    asked = parser.parse_args()
    driver = MockDriver().install()
    if asked.what == "cases":
        with mock_device():
            failures = rehearse_cases(driver, 1 if asked.all else 16)
        alone = driver.overlapped.count(False)
    else:
        with tempfile.TemporaryDirectory() as folder:
            failures = rehearse_steps(driver, _MODELS if asked.all else [("qwen3", "W4A16")], Path(folder))
            failures += _rehearse_drafts(Path(folder), _DRAFTERS if asked.all else _DRAFTERS[:1])
            alone = driver.overlapped.count(False)
            if asked.all:
                failures += _rehearse_alone(driver, Path(folder) / "llama" / "model")
    print(json.dumps({"launched": Counter(driver.launched), "alone": alone, "failures": failures}))


if __name__ == "__main__":
    main()

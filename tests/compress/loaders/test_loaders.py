"""Who loads a checkpoint: what is said before any work is what vLLM, transformers and the GGUF exporter then do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.compress.export.export import export
from smelt.compress.loaders.facts import facts_of_checkpoint
from smelt.compress.loaders.rules import LLAMA_CPP, TRANSFORMERS, VLLM, loaders
from smelt.compress.pipeline.plan import Plan
from smelt.compress.results.result import Loader
from smelt.models.directory.directory import ModelDirectory
from smelt.runtime import Engine, SamplingParams
from smelt.system.errors import SmeltError

from ...tiny import from_transformers, make_model, save_model
from ...vllm.asked import ask_vllm
from .loader_cases import AS_W4A16, SIZES, Case, cases

CASES = {case.name: case for case in cases()}
QUICK = [
    "llama W4A16",
    "llama W4A4",
    "llama W2A16",
    "llama W8A16 head",
    "qwen3 W4A16_ASYM head",
    "qwen3 W4A16 embedding",
    "mixtral plain",
    "mixtral W4A16_ASYM",
    "llama kv int8",
    "llama plain queries",
    "llama mixed with W8A16",
    "llama heads of 40",
    "llama W4A16 of 344",
    "llama pruned heads",
    "llama pruned unevenly",
    "opt W4A16",
]
PROMPTS = [[int(t) for t in torch.randint(4, 4000, (n,), generator=torch.Generator().manual_seed(n))] for n in (24, 40)]
COUNT = 8


class Built:
    """Models and checkpoints of cases, each made once."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def model(self, case: Case) -> Path:
        """The model that a case begins with."""
        key = f"{case.architecture}-{'-'.join(f'{k}={v}' for k, v in case.changes.items())}"
        path = self._place / key
        if not path.exists():
            save_model(make_model(case.architecture, torch.bfloat16, **case.changes), path)
        return path

    def recipe(self, case: Case) -> Recipe:
        """What makes a case's checkpoint."""
        return Recipe.model_validate(
            {
                "model": str(self.model(case)),
                "output": str(self._place / "runs" / case.name.replace(" ", "-")),
                "calibrate": {"samples": 4, "length": 32},
                "evaluate": False,
                "steps": list(case.steps),
            }
        )

    def checkpoint(self, case: Case) -> Path:
        """It, or the model itself."""
        return run(self.recipe(case), progress=False).checkpoint if case.steps else self.model(case)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("loaders"))


def by_name(found: list[Loader]) -> dict[str, Loader]:
    return {loader.name: loader for loader in found}


def of_checkpoint(path: Path) -> dict[str, Loader]:
    facts = facts_of_checkpoint(ModelDirectory(str(path), path))
    assert facts is not None
    return by_name(loaders(facts))


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_says_what_vllm_was_found_to_do(name: str, built: Built) -> None:
    case = CASES[name]
    if not case.steps:
        assert of_checkpoint(built.model(case))[VLLM].loads
        return
    plan = Plan.make(built.recipe(case))
    assert not plan.problems
    found = by_name(plan.loaders())
    assert found[VLLM].loads == case.in_vllm, found[VLLM]
    assert found[VLLM].loads or found[VLLM].why


def test_what_is_chosen_later_is_said_to_be_open(built: Built) -> None:
    candidates = [{"scheme": "W4A16", "group_size": 64}, {"scheme": "W8A16"}]
    step = {"quantize": {"scheme": "auto", "candidates": candidates, "target": {"bits": 6.0}, "ignore": ["lm_head"]}}
    found = by_name(Plan.make(built.recipe(Case("auto", "llama", SIZES, (step,)))).loaders())
    assert found[VLLM].why.startswith(
        "the schemes it chooses may not load: it has no kernel for packed weights of 8 bits"
    )
    assert found[TRANSFORMERS].loads


@pytest.mark.slow
def test_what_a_checkpoint_says_is_what_its_plan_said(built: Built) -> None:
    for name in ("llama pruned unevenly", "llama W4A16 of 344", "mixtral W4A16_ASYM", "qwen3 W4A16 embedding"):
        case = CASES[name]
        planned, path = by_name(Plan.make(built.recipe(case)).loaders()), built.checkpoint(case)
        assert of_checkpoint(path) == planned
        assert planned[LLAMA_CPP].loads == _exports(path)
        assert planned[TRANSFORMERS].loads == (_loaded(path) is not None)


def test_a_quantized_head_is_named_for_vllm(built: Built) -> None:
    config = json.loads((built.checkpoint(CASES["qwen3 W4A16 head"]) / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["lm_head", "Linear"]


def _exports(path: Path) -> bool:
    written = path.with_suffix(".gguf")
    try:
        export(str(path), "gguf", written, progress=False)
    except SmeltError:
        return False
    written.unlink()  # what exists is refused, and another test may export it, too
    return True


def _loaded(path: Path) -> Any:
    """The model in transformers alone; None if it refuses, or computes without a quantized weight."""
    try:
        return from_transformers(path, dtype=torch.bfloat16)
    except Exception:
        return None


@pytest.mark.slow
def test_transformers_and_the_exporter_do_what_was_said(built: Built) -> None:
    wrong = []
    for name, case in CASES.items():
        path = built.checkpoint(case)
        said = of_checkpoint(path)
        if case.steps and said != by_name(Plan.make(built.recipe(case)).loaders()):
            wrong.append(f"{name}: its plan says something else")
        if said[TRANSFORMERS].loads != (_loaded(path) is not None):
            wrong.append(f"{name}: said {said[TRANSFORMERS].sentence!r}")
        if said[LLAMA_CPP].loads != _exports(path):
            wrong.append(f"{name}: said {said[LLAMA_CPP].sentence!r}")
    assert not wrong, "\n".join(wrong)


@dataclass(frozen=True)
class Answers:
    """What computing a checkpoint's prompts gave.

    Attributes:
        tokens: greedy ones after each prompt.
        prompts: log probabilities of each prompt's tokens but the first.
    """

    tokens: list[list[int]]
    prompts: list[list[float]]

    def distance(self, other: Answers) -> float:
        """Mean absolute difference of log probabilities, in nats."""
        mine, theirs = (torch.tensor([p for each in a.prompts for p in each]) for a in (self, other))
        return (mine - theirs).abs().mean().item()


@pytest.fixture(scope="module")
def answers(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM answers of every case, in one process."""
    checkpoints = {name: built.checkpoint(case) for name, case in CASES.items()}
    return ask_vllm(tmp_path_factory.mktemp("vllm"), checkpoints, PROMPTS, COUNT)


@pytest.mark.slow
def test_vllm_loads_what_it_was_said_to_load(built: Built, answers: dict[str, Any]) -> None:
    wrong = []
    for name, case in CASES.items():
        said, refused = of_checkpoint(built.checkpoint(case))[VLLM], answers[name].get("refused")
        if said.loads != (refused is None) or case.in_vllm != said.loads:
            wrong.append(f"{name}: said {said.sentence!r}; {refused or 'loads'}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_vllm_computes_what_transformers_and_the_engine_compute(built: Built, answers: dict[str, Any]) -> None:
    """Random weights make differences large; a weight that is read in another way changes a nat or more."""
    far, rows = [], []
    for name, case in CASES.items():
        if "refused" in answers[name] or name.split()[1] in AS_W4A16:
            continue
        path = built.checkpoint(case)
        theirs, ours, other = Answers(**answers[name]), _of_engine(path), _of_transformers(path)
        distances = [theirs.distance(other), theirs.distance(ours), ours.distance(other)]
        rows.append(f"{name:32}" + "".join(f"{d:8.3f}" for d in distances))
        if min(distances[:2]) > _allowed(name):
            far.append(rows[-1])
    print("\n" + "\n".join(rows))
    assert not far, "\n".join(["vLLM from transformers, from the engine, the engine from transformers", *far])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", AS_W4A16)
def test_vllm_leaves_inputs_of_four_bit_weights_as_they_are(scheme: str, answers: dict[str, Any]) -> None:
    for architecture in ("llama", "qwen3"):
        assert answers[f"{architecture} {scheme}"] == answers[f"{architecture} W4A16"]


def _allowed(name: str) -> float:
    """Weights alone are rounding apart; where inputs are rounded too, a difference of rounding becomes one of codes."""
    return 0.4 if "fp8" in name or "FP8" in name else 0.2 if "W8A8" in name or "heads of" in name else 0.07


def _of_engine(path: Path) -> Answers:
    engine = Engine(path, quiet=True, kv_cache_memory_bytes=1 << 24)
    scores = engine.score([(ids[:1], ids[1:]) for ids in PROMPTS])
    greedy = engine.generate(PROMPTS, SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True))
    return Answers([list(each.outputs[0].token_ids) for each in greedy], [[t.logprob for t in each] for each in scores])


@torch.no_grad()
def _of_transformers(path: Path) -> Answers:
    model = from_transformers(path, dtype=torch.bfloat16).eval()
    prompts, tokens = [], []
    for ids in PROMPTS:
        chances = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        prompts.append([chances[i, token].item() for i, token in enumerate(ids[1:])])
        made = model.generate(torch.tensor([ids]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
        tokens.append(made[0, len(ids) :].tolist())
    return Answers(tokens, prompts)

"""A step's time by part."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from ..decoder.linears.linear import Linear
from ..decoder.model import Model
from ..decoder.parts.batch import Batch
from ..decoder.parts.kv_cache import KeysValues
from ..engine.engine import Engine
from ..requests.params import SamplingParams
from ..sampling.draw import DrawTokens
from ..sampling.logit_statistics import LogitStatistics
from .workload import random_prompt

_STEPS = 32
_REPEATS = 5

LINEARS, LAYERS, HEAD = "linears", "attention, norms and the rest of the layers", "output head"
CHOOSING, SCHEDULING = "choosing tokens and laying out the step", "scheduling and text"


def time_of_decoding(engine: Engine, prompt: int, generate: int) -> dict[str, float]:
    """Seconds of a decode step of one sequence, by part.

    Args:
        engine: that nothing else uses.
        prompt: tokens before the first.
        generate: tokens to generate; medians over their steps are given.
    """
    with _Clock(engine) as clock:
        steps = clock.steps(prompt, min(generate, _STEPS) + 2)
    decodes = [step for step, tokens in steps if tokens == 1][1:] or [step for step, _ in steps]
    return _split(engine, {part: statistics.median(step[part] for step in decodes) for part in decodes[0]}, 1, 1)


def time_of_prompt(engine: Engine, prompt: int) -> dict[str, float]:
    """Seconds until the first token of a single prompt, by part."""
    found = []
    with _Clock(engine) as clock:
        for i in range(3):
            steps = clock.steps(prompt, 1, seed=i)
            found.append({part: sum(step[part] for step, _ in steps) for part in steps[0][0]})
    rows = min(prompt, engine.scheduler.max_num_batched_tokens)
    return _split(
        engine, {part: statistics.median(each[part] for each in found) for part in found[0]}, rows, prompt / rows
    )


class _Clock:
    """Measures an engine's steps; while it is entered, the engine's model is wrapped."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._timed = _TimedModel(engine.model)

    def __enter__(self) -> _Clock:
        self._engine.executor.model = self._timed
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.executor.model = self._engine.model

    def steps(self, prompt: int, generate: int, seed: int = 0) -> list[tuple[dict[str, float], int]]:
        """Each step's parts, and how many tokens it computed."""
        engine, taken = self._engine, self._timed.taken
        ids = random_prompt(prompt, engine.model.spec.vocabulary, 50_000 + seed)
        name = engine.add_request(ids, SamplingParams(max_tokens=generate, temperature=0, ignore_eos=True))
        execute = engine.executor.execute
        inside = [0.0]

        def timed(plan):  # type: ignore[no-untyped-def]
            begun = time.perf_counter()
            result = execute(plan)
            inside[0] = time.perf_counter() - begun
            return result

        engine.executor.execute = timed  # type: ignore[method-assign]
        found = []
        try:
            while engine.is_running(name):
                taken.clear()
                begun = time.perf_counter()
                engine.step()
                whole = time.perf_counter() - begun
                layers, head = taken["layers"], taken["head"]
                step = {
                    LAYERS: layers,
                    HEAD: head,
                    CHOOSING: inside[0] - layers - head,
                    SCHEDULING: whole - inside[0],
                }
                found.append((step, self._timed.tokens))
        finally:
            engine.abort(name)
            engine.executor.execute = execute  # type: ignore[method-assign]
        return found


class _TimedModel:
    def __init__(self, model: Model) -> None:
        self._model = model
        self.taken: dict[str, float] = defaultdict(float)
        self.tokens = 0

    @property
    def logit_statistics(self) -> Callable[[Tensor], LogitStatistics]:
        return self._model.logit_statistics

    @property
    def draw_tokens(self) -> DrawTokens:
        return self._model.draw_tokens

    @torch.inference_mode()
    def __call__(self, batch: Batch, store: KeysValues) -> Tensor:
        begun = time.perf_counter()
        hidden = self._model.hidden(batch, store)
        between = time.perf_counter()
        logits = self._model.head(hidden[batch.wanted])
        self.taken["layers"] += between - begun
        self.taken["head"] += time.perf_counter() - between
        self.tokens = len(batch.tokens)
        return logits


def _split(engine: Engine, parts: dict[str, float], rows: int, times: float) -> dict[str, float]:
    """The layers' time divided into the linears, measured separately, and the rest."""
    linears = min(parts[LAYERS], times * _time_of_linears(engine.model, rows))
    return {LINEARS: linears, **parts, LAYERS: parts[LAYERS] - linears}


@torch.inference_mode()
def _time_of_linears(model: Model, rows: int) -> float:
    """The time of all linears of the layers in order, as in a step, so that no weights are in the processor's caches."""
    found = []
    linears = [(role, linear) for role, linear in model.linears().items() if role != "head"]
    experts, chosen = model.spec.experts, model.spec.experts_per_token
    inputs = {linear.columns: torch.randn(rows, linear.columns).to(model.dtype) for _, linear in linears}
    for _ in range(_REPEATS):
        total = 0.0
        for role, linear in linears:
            # In a mixture of experts each row goes to a few experts.
            share = chosen / experts if " expert " in role else 1.0
            total += _timed(linear, inputs[linear.columns]) * share
        found.append(total)
    return statistics.median(found)


def _timed(linear: Linear, x: Tensor) -> float:
    begun = time.perf_counter()
    linear(x)
    return time.perf_counter() - begun

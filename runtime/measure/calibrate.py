"""Calibration: steps of real engines with random models of several shapes and formats, timed on this machine."""

from __future__ import annotations

import platform
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from ...models.directory.directory import ModelDirectory
from ...quant.scheme import Scheme, resolve
from ...system.hardware.machine import processor_name
from ...system.progress import Log
from ..costs.calibration import Calibration, MeasuredStep, calibration
from ..costs.model_size import ModelSize, model_size
from ..costs.work import PAUSE_SECONDS, StepWork
from ..engine.engine import Engine
from ..engine.setup.config import EngineConfig
from ..requests.params import SamplingParams
from ..scheduling.plan import StepPlan
from .random_checkpoint import write_random_checkpoint
from .workload import random_prompt

# Unquantized, and the formats that kernels for CPUs tell apart.
FORMATS = ("bfloat16", "W4A16 g64", "W4A16 g128", "W8A16 g128", "W8A8")
_LONGEST = 2048
# At least so many loads of each model: more than eight at once, one by one, and after pauses.
_ROUNDS = 3
_PAUSED_REQUESTS = 3
# Of prompts, in a load.
_MOST_TOKENS = 4096
_NAP_SECONDS = 3 * PAUSE_SECONDS
# In a step, of the next request while others run.
_ARRIVES = 0.2


@dataclass(frozen=True)
class Shape:
    """A Llama to measure: its width, that of its feed-forward part, layers, heads and vocabulary."""

    hidden: int
    wide: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.hidden}x{self.layers}"

    def config(self) -> Any:
        """As a Hugging Face configuration."""
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.wide,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            head_dim=self.hidden // self.heads,
            vocab_size=self.vocabulary,
            tie_word_embeddings=True,
            max_position_embeddings=_LONGEST,
            bos_token_id=None,
            eos_token_id=None,
        )


# From what fits into caches to what streams from memory; depth and width vary apart.
SHAPES = (
    Shape(256, 768, 6, 8, 4, 4096),
    Shape(256, 768, 24, 8, 4, 8192),
    Shape(512, 1408, 16, 8, 4, 8192),
    Shape(1024, 3072, 8, 16, 8, 16384),
    Shape(1280, 3456, 12, 20, 4, 32000),
    Shape(2048, 5632, 6, 32, 8, 32000),
)


def calibrate(
    *,
    shapes: Sequence[Shape] = SHAPES,
    formats: Sequence[str] = FORMATS,
    passes: int = 3,
    seconds: float = 3.0,
    command: str,
    log: Log,
) -> Calibration:
    """Measure steps of each shape in each format, and fit this machine's prices.

    Args:
        shapes: of the models.
        formats: how their linears are stored: ``bfloat16`` or schemes, with a group size.
        passes: over all of them, because a machine's speed drifts.
        seconds: to measure each for in a pass.
        command: what was typed, for the file.
        log: gets messages for the user.
    """
    configurations: dict[str, list[MeasuredStep]] = {}
    every = [(shape, form) for shape in shapes for form in formats]
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(passes):
            for i, (shape, form) in enumerate(every):
                name = f"{shape.name} {form}"
                log(f"pass {turn + 1} of {passes}: {name} ({i + 1} of {len(every)})")
                folder = Path(scratch) / str(i)
                if not folder.exists():
                    write_random_checkpoint(folder, shape.config(), _scheme(form))
                engine = Engine(folder, EngineConfig(max_num_seqs=32, quiet=True, enable_prefix_caching=False))
                size = model_size(ModelDirectory(name, folder))
                configurations.setdefault(name, []).extend(measured_steps(engine, size, seconds=seconds, seed=turn))
                engine.close()
                del engine  # before the next one is loaded
    threads = torch.get_num_threads()
    return calibration(
        configurations,
        device=f"{processor_name()}, {threads} threads",
        made={
            "command": command,
            "date": date.today().isoformat(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "smelt": version("smelt"),
        },
        memory_bytes=psutil.virtual_memory().total,
    )


def _scheme(form: str) -> Scheme | None:
    name, _, group = form.partition(" g")
    return None if name == "bfloat16" else resolve(name, int(group) if group else None)


def measured_steps(engine: Engine, size: ModelSize, *, seconds: float, seed: int = 0) -> list[MeasuredStep]:
    """Time an engine's steps under loads of many kinds: alone and in batches, short and long prompts, with and without decodes,
    at once, one by one, and after pauses.

    Args:
        engine: that nothing else uses.
        size: of its model.
        seconds: for how long.
        seed: of the loads.
    """
    recorder = StepRecorder(engine)
    draw = random.Random(seed)
    longest = min(engine.max_model_len, _LONGEST)
    _serve(engine, [(64, 4)] * 2, draw)  # kernels are compiled, and buffers allocated
    recorder.times.clear()
    ends = time.perf_counter() + seconds
    round_ = 0
    while time.perf_counter() < ends or round_ < _ROUNDS:
        # Alternately many, one, a few; of long outputs with short prompts, and the reverse.
        count = (16, 1, 4, 32, 2, 8)[round_ % 6]
        prompt_most = max(2, int(longest * draw.choice([0.02, 0.1, 0.4, 0.9])))
        requests = [
            (
                min(draw.randint(1, prompt_most), _MOST_TOKENS // count),
                draw.randint(1, max(1, min(64, longest - prompt_most))),
            )
            for _ in range(count)
        ]
        manner = (round_ + round_ // 6) % 3  # each number of requests in each manner
        if manner == 2:
            for request in requests[:_PAUSED_REQUESTS]:
                recorder.pause(asleep=True)
                time.sleep(_NAP_SECONDS)
                _serve(engine, [request], draw)
        else:
            _serve(engine, requests, draw, at_once=manner == 0)
        recorder.pause()
        round_ += 1
    engine.core.on_step = None
    return recorder.steps(size)


class StepRecorder:
    """Records an engine's steps: when each was scheduled, and its work.

    Attributes:
        times: of each step its time and work; None for a pause.
    """

    def __init__(self, engine: Engine) -> None:
        self.times: list[tuple[float, StepWork] | None] = []
        self._asleep = False
        engine.core.on_step = self._record

    def pause(self, *, asleep: bool = False) -> None:
        """The engine has no work.

        Args:
            asleep: for :data:`PAUSE_SECONDS` or longer.
        """
        self.times.append(None)
        self._asleep = asleep

    def steps(self, size: ModelSize) -> list[MeasuredStep]:
        """All steps whose end is known: the next one's start."""
        found = []
        for now, then in zip(self.times, self.times[1:], strict=False):
            if now is not None and then is not None:
                found.append(MeasuredStep(size, now[1], then[0] - now[0]))
        return found

    def _record(self, plan: StepPlan) -> None:
        self.times.append((plan.at, replace(StepWork.of(plan), after_pause=self._asleep)))
        self._asleep = False


def _serve(engine: Engine, requests: list[tuple[int, int]], draw: random.Random, *, at_once: bool = True) -> None:
    """Serve requests, that come together or while others run."""
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and (at_once or not engine.has_work or draw.random() < _ARRIVES):
            prompt, output = waiting.pop()
            ids = random_prompt(prompt, engine.model.spec.vocabulary, draw.randrange(1 << 30))
            engine.add_request(ids, SamplingParams(max_tokens=output, temperature=0, ignore_eos=True))
        engine.step()


def table(found: Calibration) -> str:
    """A calibration for a terminal: how well it predicts what it was not fitted on."""
    lines = [
        found.device,
        f"{'configuration, left out of the fit':<36}{'predicted / measured':>22}",
        *(f"{name:<36}{ratio:>22.2f}" for name, ratio in found.left_out.items()),
        f"within {found.spread:.0%}; measured: {', '.join(found.kernels)}",
    ]
    return "\n".join(lines)

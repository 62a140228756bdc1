"""A process that serves one checkpoint and measures it on request: one line of JSON in, one out.

Each model is measured in its own process so that its memory and loading time are its own, and so that several
can wait for their turn with their weights in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from typing import Any

from ...system.processes.child_processes import ends_with
from ...system.processes.garbage import collect_old_seldom

_WARM_UP_SECONDS = 0.25


def main() -> None:
    """Answer commands until standard input ends."""
    collect_old_seldom()
    ends_with(int(sys.argv[1]))
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:  # goes to the process that asked
            answer = {"error": " ".join(str(error).split()) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


class _Worker:
    """Its methods are the commands."""

    def load(self, checkpoint: str, options: dict[str, Any]) -> dict[str, Any]:
        from ...runtime import Engine, EngineConfig

        begun = time.perf_counter()
        self._engine = Engine(checkpoint, EngineConfig(**options))
        taken = time.perf_counter() - begun
        model = self._engine.model
        return {
            "seconds": taken,
            "dtype": str(model.dtype).removeprefix("torch."),
            "bytes_per_token": self._engine.cost.bytes,
            "operations_per_token": self._engine.cost.operations,
            "kernels": self._engine.explain(),
        }

    def machine(self, dtype: str, device: str) -> dict[str, Any]:
        import torch

        from ...runtime.measure.machine_rates import machine_rates

        found = machine_rates(torch.device(device), getattr(torch, dtype))
        return {"read": found.read_bytes, "operations": found.operations}

    def load_of(self, prompt: int, generate: int, concurrency: int, seed: int) -> dict[str, Any]:
        from ...runtime.measure.bench import run_load
        from ...runtime.requests.trace import Arrival

        # The previous turn was another process's: this one's threads sleep, caches hold the other's weights, and
        # an idle processor takes a while to reach full speed.
        begun = time.perf_counter()
        while time.perf_counter() - begun < _WARM_UP_SECONDS:
            run_load(self._engine, "", [Arrival(0, min(prompt, 32), min(generate, 4))], 1, seed + 1)
        arrivals = [Arrival(0, prompt, generate)] * concurrency
        return dataclasses.asdict(run_load(self._engine, "", arrivals, concurrency, seed))

    def load_drafting(
        self, checkpoint: str, options: dict[str, Any], text: dict[str, Any], prompt: int
    ) -> dict[str, Any]:
        from ...models.text.text_source import TextSource
        from ...runtime import Engine, EngineConfig
        from ...runtime.measure.workload import text_prompts

        self._engine = Engine(checkpoint, EngineConfig(**options))
        self._prompts = text_prompts(self._engine.tokenizer, prompt, TextSource(**text))
        return {}

    def drafts_of(self, prompt: int, generate: int, concurrency: int, seed: int, drafts_first: bool) -> dict[str, Any]:
        from ...runtime.measure.bench import run_load, undrafted
        from ...runtime.requests.trace import Arrival

        assert self._engine.drafting is not None
        arrivals = [Arrival(0, prompt, generate)] * concurrency
        rates, answers, counts = {}, [], None
        self._engine.drafting.begin_load()
        for drafted in (drafts_first, not drafts_first):
            with contextlib.nullcontext() if drafted else undrafted(self._engine):
                run_load(self._engine, "", [Arrival(0, min(prompt, 32), min(generate, 4))], 1, seed - 1, self._prompts)
                before, said = self._engine.drafting.total.copy(), []
                load = run_load(self._engine, "", arrivals, concurrency, seed, self._prompts, said)
            rates["drafted" if drafted else "alone"] = load.output_rate
            if drafted:
                counts = self._engine.drafting.total.since(before)
            answers.append(said)
        assert counts is not None
        same = sum(a == b for a, b in zip(*answers, strict=True))
        return {**rates, "same": same, "counts": dataclasses.asdict(counts)}

    def time(self, prompt: int, generate: int) -> dict[str, Any]:
        from ...runtime.measure.profile import time_of_decoding, time_of_prompt

        if self._engine.model.device.type != "cpu" or self._engine.config.ranks > 1:
            return {"decode": {}, "prefill": {}}  # this process' clock sees neither a GPU's time nor other ranks'
        return {
            "decode": time_of_decoding(self._engine, prompt, generate),
            "prefill": time_of_prompt(self._engine, prompt),
        }

    def memory(self) -> dict[str, Any]:
        from ...runtime.measure.bench import peak_memory

        return {"peak": peak_memory(self._engine.model.device)}


if __name__ == "__main__":
    main()

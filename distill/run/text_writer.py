"""Text generated for training: continuations of prompts, by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...runtime.engine.engine import Engine
from ...runtime.engine.setup.config import EngineConfig
from ...runtime.native.library import has_needed
from ...runtime.requests.params import SamplingParams
from ...system.errors import RuntimeProblem, SmeltError
from ...system.hardware.device import give_back

# The engine's steps: prompts are short, and all sequences run at once.
_MOST_TOGETHER = 64


# Of what is free besides the weights; others need memory, too.
_CACHE_SHARE = 0.5
_NEVER = -1e6  # added to a logit


def writing_dtype(device: torch.device) -> torch.dtype:
    """In which models write text, whose samples do not tell bfloat16 from more: what is fastest, without compiled kernels float32."""
    has_kernels = device.type != "cpu" or has_needed()
    return torch.bfloat16 if has_kernels else torch.float32


def cache_room(free: int) -> int:
    """How many bytes keys and values of what is written may take, of so many that are free besides the weights."""
    return max(0, int(free * _CACHE_SHARE))


class Writer:
    """Continues prompts on the engine, with the weights last loaded.

    Args:
        directory: a model directory of the same shapes; its weights are used until others are loaded.
        device: where.
        length: tokens per window, including the prompt.
        together: windows that are generated at once.
        vocabulary: how many tokens it may write, the first ones; those that only this model's table has are of no use to others.
        trust_remote_code: run the model's own Python.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        length: int,
        together: int,
        vocabulary: int,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        at_once = min(together, _MOST_TOGETHER)
        self._length, self._device = length, device
        try:
            config = EngineConfig(
                dtype=str(writing_dtype(device)).removeprefix("torch."),
                max_model_len=length,
                max_num_seqs=at_once,
                max_num_batched_tokens=max(512, at_once),
                memory_utilization=_CACHE_SHARE,
                trust_remote_code=trust_remote_code,
                device=str(device),
                quiet=True,
            )
            self._engine = Engine(directory, config)
            beyond = range(vocabulary, self._engine.model.spec.vocabulary)
            self._bias = dict.fromkeys(beyond, _NEVER)
        except RuntimeProblem as problem:
            raise SmeltError(
                f"{directory}: the runtime cannot generate text with it ({problem}); give a text instead"
            ) from None

    def close(self) -> None:
        """Let others have its memory."""
        self._engine.close()
        del self._engine
        give_back(self._device)

    def take_weights(self, config: Any, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        """Use other weights from here on; see :meth:`Engine.take_weights`."""
        self._engine.take_weights(config, names, load)

    def continued(
        self, prompts: Tensor, temperature: float, seed: int, first: int = 0, *, ends: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Prompts ``[windows, tokens]`` with their continuations, ``[windows, length]``, and which of these the model wrote.

        Where it ended before the length, its end token fills up the window; unless it does not end.

        Args:
            prompts: token ids.
            temperature: of sampling; 0 for greedy decoding.
            seed: each window's samples depend only on it and on the window's index.
            first: the index of the first window.
            ends: whether an end token ends what it writes.
        """
        count = self._length - prompts.shape[1]
        params = [
            SamplingParams(
                max_tokens=count,
                temperature=temperature,
                ignore_eos=not ends,
                seed=(seed * 65_537 + i) % 2**63,
                logit_bias=self._bias,
            )
            for i in range(first, first + len(prompts))
        ]
        outputs = self._engine.generate(prompts.tolist(), params)
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise SmeltError(f"generating text for training failed: {failed}")
        tokens = prompts.new_zeros(len(prompts), self._length)
        written = torch.zeros(tokens.shape, dtype=torch.bool)
        for i, output in enumerate(outputs):
            own = output.outputs[0].token_ids
            stop = prompts.shape[1] + len(own)
            tokens[i] = torch.tensor([*prompts[i].tolist(), *own, *own[-1:] * (self._length - stop)])
            written[i, prompts.shape[1] : stop] = True
        return tokens, written

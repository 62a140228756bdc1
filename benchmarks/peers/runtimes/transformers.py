"""Transformers in bfloat16, as loaded; and with torchao's int4 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .peer import REQUESTS, SEED, Peer, TokenClock, Tokens, check_count, seconds

CACHE_PAGES = 2 * REQUESTS
BATCH_TOKENS = 2048
GROUP_SIZE = 128


class Transformers(Peer):
    """Transformers in bfloat16."""

    package = "transformers"
    format = "bf16"
    notes = (
        "SDPA attention; concurrent_32 is generate_batch with a warm manager, "
        "concurrent_32_static is generate on one batch of 32."
    )

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.settings.threads)
        torch.manual_seed(SEED)
        self._model = AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        import torch

        inputs = torch.tensor(prompts)
        outputs = self._model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=count,
            do_sample=False,
            streamer=None if clock is None else _streamer(clock),
            **self._options(),
        )
        check_count(outputs.shape[1] - inputs.shape[1], count)

    def _options(self) -> dict[str, Any]:
        """Further options of ``generate``."""
        return {}

    def concurrent(self, prompts: list[Tokens], count: int) -> float:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        generation = GenerationConfig(max_new_tokens=count, do_sample=False)
        batching = ContinuousBatchingConfig(
            num_blocks=CACHE_PAGES,
            max_batch_tokens=BATCH_TOKENS,
            allow_block_sharing=False,
            seed=SEED,
        )
        results: dict[str, Any] = {}
        taken = seconds(
            lambda: results.update(
                self._model.generate_batch(
                    prompts,
                    generation_config=generation,
                    continuous_batching_config=batching,
                    persistent_manager=True,
                )
            )
        )
        check_count(len(results), len(prompts))
        for result in results.values():
            check_count(len(result.generated_tokens), count)
        return taken

    def concurrent_runs(self) -> dict[str, Callable[[list[Tokens], int], float]]:
        """The static batch first: ``generate_batch`` changes the model's attention for good."""
        return {"concurrent_32_static": super().concurrent, "concurrent_32": self.concurrent}


class TorchAo(Transformers):
    """torchao's int4 weights under Transformers, with the decoding step compiled."""

    package = "torchao"
    format = "int4 weights asymmetric, group 128, bf16 activations"
    notes = (
        "The CPU int4 layout is torchao's prototype PrototypeInt4WeightOnlyConfig, which quantizes "
        "at loading and covers the output projection; static cache and torch.compile."
    )
    prefill_lengths = ()
    decode_lengths = (128,)

    def load(self) -> None:
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import quantize_

        super().load()
        quantize_(self._model, PrototypeInt4WeightOnlyConfig(group_size=GROUP_SIZE))

    def _options(self) -> dict[str, Any]:
        """Compilation, which Transformers leaves off on a CPU by default."""
        from transformers import CompileConfig

        compilation = CompileConfig(fullgraph=False, dynamic=False, mode="default")
        compilation._compile_all_devices = True
        return {"cache_implementation": "static", "compile_config": compilation}

    def concurrent_runs(self) -> dict[str, Callable[[list[Tokens], int], float]]:
        return {}


def _streamer(clock: TokenClock) -> Any:
    from transformers.generation.streamers import BaseStreamer

    class Streamer(BaseStreamer):
        """Notes every call but the first, which carries the prompt."""

        def __init__(self) -> None:
            self.past_prompt = False

        def put(self, value: Any) -> None:
            if self.past_prompt:
                clock.tick()
            self.past_prompt = True

        def end(self) -> None: ...

    return Streamer()

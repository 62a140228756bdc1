"""llama.cpp, through the low-level bindings of llama-cpp-python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .gguf_file import write_gguf
from .peer import LONGEST, OUTPUT_TOKENS, REQUEST_PROMPT, REQUESTS, Peer, PeerError, TokenClock, Tokens, convert_once

BATCH = 2048


@dataclass(frozen=True)
class BatchRow:
    """One token of a llama.cpp batch."""

    token: int
    position: int
    sequence: int
    wants_next: bool


class LlamaCpp(Peer):
    """llama.cpp with its Q4_0 format."""

    package = "llama_cpp_python"
    format = "GGUF Q4_0 with a Q6_K output projection, f16 cache"
    notes = (
        "Flash attention is left to llama.cpp's own choice; the 32 requests are 32 sequences of one "
        "context with a cache stream each."
    )

    @property
    def gguf(self) -> Path:
        """The quantized model's file."""
        return self.settings.scratch / f"{self.settings.model.name}-q4_0.gguf"

    def convert(self) -> None:
        convert_once(self.gguf, self._quantize)

    def _quantize(self, target: Path) -> None:
        """Through an intermediate bfloat16 file, which is then removed."""
        import llama_cpp

        full = target.with_name(f"{self.settings.model.name}-bf16.gguf")
        write_gguf(self.settings, full)
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        parameters.nthread = self.settings.threads
        status = llama_cpp.llama_model_quantize(bytes(full), bytes(target), parameters)
        full.unlink()
        if status != 0:
            raise PeerError(f"llama.cpp's quantizer ended with status {status}.")

    def load(self) -> None:
        import llama_cpp

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(bytes(self.gguf), llama_cpp.llama_model_default_params())
        if not self._model:
            raise PeerError("llama.cpp could not load the quantized model.")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._single = self._context(LONGEST, 1)
        self._parallel = self._context(REQUESTS * (REQUEST_PROMPT + OUTPUT_TOKENS), REQUESTS)

    def _context(self, tokens: int, sequences: int) -> Any:
        """With room for ``tokens`` shared out over ``sequences``."""
        import llama_cpp

        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = BATCH
        parameters.n_seq_max = sequences
        parameters.n_threads = self.settings.threads
        parameters.n_threads_batch = self.settings.threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise PeerError("llama.cpp could not create a context.")
        return context

    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        import llama_cpp

        clock = clock or TokenClock()
        context = self._single if len(prompts) == 1 else self._parallel
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        length = len(prompts[0])
        rows = [
            BatchRow(token, position, sequence, position == length - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        whole = BATCH // length * length  # no prompt is cut
        tokens: Tokens = []
        for offset in range(0, len(rows), whole):
            tokens += self._step(context, rows[offset : offset + whole])
        clock.tick()
        for position in range(length, length + count - 1):
            step = [BatchRow(token, position, sequence, True) for sequence, token in enumerate(tokens)]
            tokens = self._step(context, step)
            clock.tick()

    def _step(self, context: Any, rows: Sequence[BatchRow]) -> Tokens:
        """Run the rows as one batch: the most likely next token of each row that asks."""
        import llama_cpp

        batch = self._batch
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index] = row.token
            batch.pos[index] = row.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row.sequence
            batch.logits[index] = row.wants_next
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise PeerError(f"llama.cpp's decoder ended with status {status}.")
        return [self._greedy(context, index) for index, row in enumerate(rows) if row.wants_next]

    def _greedy(self, context: Any, index: int) -> int:
        import llama_cpp

        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

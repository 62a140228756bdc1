"""CTranslate2 with int8 weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .peer import Peer, TokenClock, Tokens, check_count, convert_once


class CTranslate2(Peer):
    """CTranslate2 with int8 weights."""

    package = "ctranslate2"
    format = "CTranslate2 int8 weights, float32 activations"
    notes = "The backend and instruction set are CTranslate2's own choice; the 32 requests are one batch."

    @property
    def folder(self) -> Path:
        """The converted model's folder."""
        return self.settings.scratch / f"{self.settings.model.name}-ctranslate2-int8"

    def convert(self) -> None:
        convert_once(self.folder, self._convert)

    def _convert(self, target: Path) -> None:
        from ctranslate2.converters import TransformersConverter

        converter = TransformersConverter(str(self.settings.model), low_cpu_mem_usage=True)
        converter.convert(str(target), quantization="int8")

    def load(self) -> None:
        import ctranslate2

        self._words: list[str] = json.loads((self.folder / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(self.folder),
            device="cpu",
            compute_type="int8",
            inter_threads=1,
            intra_threads=self.settings.threads,
        )

    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        clock = clock or TokenClock()

        def note(_: Any) -> bool:
            clock.tick()
            return False

        results = self._generator.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            callback=note,
        )
        for result in results:
            check_count(len(result.sequences_ids[0]), count)

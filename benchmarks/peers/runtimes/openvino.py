"""OpenVINO GenAI, with models that optimum-intel exports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .peer import Peer, PeerError, TokenClock, Tokens, check_count, convert_once

CACHE_GIGABYTES = 1


class OpenVino(Peer):
    """With int4 weights."""

    package = "openvino_genai"
    format = "OpenVINO IR int4 symmetric, group 128, ratio 1.0, int8 embedding and output projection"
    notes = (
        "LATENCY hint, dynamic quantization, cache precision and scheduler at their defaults; one "
        "request goes through LLMPipeline and the 32 through ContinuousBatchingPipeline."
    )
    weights: ClassVar[str] = "int4"
    export_options: ClassVar[Sequence[str]] = ("--sym", "--group-size", "128", "--ratio", "1.0")

    @property
    def folder(self) -> Path:
        """The exported model's folder."""
        return self.settings.scratch / f"{self.settings.model.name}-openvino-{self.weights}"

    def convert(self) -> None:
        convert_once(self.folder, self._export)

    def _export(self, target: Path) -> None:
        """Through optimum-cli, whose output goes to standard error."""
        command = [self.settings.exporter, "export", "openvino", "--model", str(self.settings.model)]
        command += ["--task", "text-generation-with-past", "--weight-format", self.weights]
        command += [*self.export_options, str(target)]
        try:
            subprocess.run(command, check=True, stdout=sys.stderr)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PeerError(f"The OpenVINO export failed: {error}.") from error

    def load(self) -> None:
        import openvino_genai

        self._single: Any = openvino_genai.LLMPipeline(self.folder, "CPU", self._properties())
        self._batched: Any = None

    def generate(self, prompts: list[Tokens], count: int, clock: TokenClock | None = None) -> None:
        if len(prompts) > 1:
            results = self._batching().generate([_tensor(each) for each in prompts], [_greedy(count)] * len(prompts))
            for result in results:
                check_count(len(result.m_generation_ids[0]), count)
            return
        streamer = [] if clock is None else [_streamer(clock)]
        result = self._single.generate(_tensor(prompts[0]), _greedy(count), *streamer)
        check_count(len(result.tokens[0]), count)

    def _batching(self) -> Any:
        """The continuous-batching pipeline, in the place of that for one request."""
        import openvino_genai

        if self._batched is None:
            self._single = None
            scheduler = openvino_genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False
            scheduler.cache_size = CACHE_GIGABYTES
            self._batched = openvino_genai.ContinuousBatchingPipeline(self.folder, scheduler, "CPU", self._properties())
        return self._batched

    def _properties(self) -> dict[str, Any]:
        return {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": self.settings.threads}


class OpenVinoInt8(OpenVino):
    """With int8 weights."""

    format = "OpenVINO IR int8 asymmetric, per channel"
    weights = "int8"
    export_options = ()


def _greedy(count: int) -> Any:
    """The options of greedy decoding of exactly ``count`` tokens."""
    import openvino_genai

    options = openvino_genai.GenerationConfig()
    options.max_new_tokens = count
    options.ignore_eos = True
    options.do_sample = False
    return options


def _tensor(tokens: Tokens) -> Any:
    import openvino

    return openvino.Tensor(np.array([tokens], dtype=np.int64))


def _streamer(clock: TokenClock) -> Any:
    import openvino_genai

    class Streamer(openvino_genai.StreamerBase):
        """Counts token ids and makes no text of them."""

        def write(self, token: int | list[int]) -> Any:
            clock.tick(len(token) if isinstance(token, list) else 1)
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None: ...

    return Streamer()

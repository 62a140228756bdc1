"""A server's model as a model of lm-eval: tokenized, cut and stopped like one on the engine."""

from __future__ import annotations

from collections.abc import Generator

from ....runtime import SamplingParams
from ...integrations.lm_eval import SmeltLM
from .on_server import RemoteModel

# Prompts given to the server's client at once: enough to keep its connections busy, few enough to show progress.
_TOGETHER = 256


class ServerLM(SmeltLM):
    """Scores and continues text with a server.

    Args:
        model: behind the server.
        disable_tqdm: show no progress.
    """

    def __init__(self, model: RemoteModel, disable_tqdm: bool | None = None) -> None:
        super().__init__(engine=model, disable_tqdm=disable_tqdm)  # type: ignore[arg-type]
        self._model = model

    def _texts(self, prompts: list[tuple[list[int], SamplingParams]]) -> Generator[tuple[int, str]]:
        for start in range(0, len(prompts), _TOGETHER):
            yield from enumerate(self._model.complete(prompts[start : start + _TOGETHER]), start)

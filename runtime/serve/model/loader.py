"""Loads models for a server, each with its share of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ....models.directory.find import find_checkpoint
from ...engine.engine import Engine
from ...engine.engine_thread import EngineThread
from ...engine.ranks.reserve import share_of
from ...engine.setup.config import EngineConfig
from ...engine.setup.loading import in_own_thread
from .answer_format import AnswerFormat, AnswerOptions
from .served_model import ServedModel


class ModelLoader:
    """Loads models one after another; all are stepped by one thread.

    Args:
        config: of each engine.
        share: how many models share the memory that is free now, evenly.
        options: how they answer.

    Raises:
        RuntimeProblem: there is no parser of that name, or no such device.
    """

    def __init__(self, config: EngineConfig, share: int, options: AnswerOptions | None = None) -> None:
        self._options = options or AnswerOptions()
        AnswerFormat.of(None, self._options.tool_call_parser)  # refuses a name that is not known
        self.share = share
        self._thread = EngineThread()
        self._config = share_of(config, share)

    def load(self, name: str, checkpoint: str | Path) -> ServedModel:
        """Load a checkpoint. It takes as long as its weights need.

        Args:
            name: what requests call it.
            checkpoint: a directory, a hub name or ``builtin:smelt-6m``.

        Raises:
            SmeltError: it cannot be read or served, or does not fit in its share of the memory.
        """
        path = find_checkpoint(str(checkpoint)).path
        engine = in_own_thread(partial(Engine, path, self._config, thread=self._thread))
        return ServedModel(name, engine, path, options=self._options)


def load_all(loader: ModelLoader, models: Mapping[str, str | Path], adapters: Mapping[str, str]) -> list[ServedModel]:
    """Load checkpoints, and adapters beside the first.

    Args:
        loader: of the models.
        models: checkpoints by the names that requests call them.
        adapters: directories by name.

    Raises:
        SmeltError: one of them cannot be read or served, or does not fit in memory.
    """
    found = [loader.load(name, place) for name, place in models.items()]
    for name, place in adapters.items():
        in_own_thread(partial(found[0].engine.load_adapter, name, place))
        found.append(found[0].variant(name))
    return found

"""An engine's LoRA adapters: loaded and dropped while requests run."""

from __future__ import annotations

from pathlib import Path

from ...models.structure.lora import Adapter
from ...system.errors import RuntimeProblem, nearest_name
from ..decoder.model import Model
from ..requests.sequence import Request
from .core import EngineCore


class EngineAdapters:
    """The adapters beside an engine's model, by name.

    Args:
        model: the engine's.
        core: the engine's requests, and the lock of its steps.
        room: bytes of memory for them.
        refused: why the engine takes none; None if it does.
    """

    def __init__(self, model: Model, core: EngineCore, room: int, refused: str | None) -> None:
        self._model, self._core, self._room, self._refused = model, core, room, refused
        self._fingerprints: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Those that are loaded."""
        return list(self._fingerprints)

    def load(self, name: str, directory: Path) -> None:
        """See :meth:`.Engine.load_adapter`."""
        found = Adapter(directory)
        with self._core.lock:
            if name in self._fingerprints:
                raise RuntimeProblem(
                    f"an adapter named {name!r} is loaded already; unload it first, or choose another name"
                )
            if self._refused is not None:
                raise RuntimeProblem(self._refused)
            adapters = self._model.adapters()
        # Steps go on meanwhile: no request can name it yet.
        adapters.load(name, found, self._room)
        self._fingerprints[name] = found.fingerprint()

    def unload(self, name: str) -> None:
        """See :meth:`.Engine.unload_adapter`."""
        with self._core.lock:
            if name not in self._fingerprints:
                raise RuntimeProblem(f"no adapter named {name!r} is loaded{nearest_name(name, self.names)}")
            count = sum(request.adapter == name for request in self._core.requests.values())
            if count:
                raise RuntimeProblem(
                    f"{count} requests for the adapter {name!r} are running; wait for them, or abort them"
                )
            self._model.adapters().unload(name)
            del self._fingerprints[name]

    def forget(self, model: Model) -> None:
        """Drop all of them with their model, of which ``model`` takes the place."""
        self._model, self._fingerprints = model, {}

    def salt(self, name: str | None) -> bytes:
        """What keys and values of a request for an adapter depend on besides its tokens.

        Raises:
            RuntimeProblem: it is not loaded.
        """
        if name is None:
            return b""
        if name not in self._fingerprints:
            raise RuntimeProblem(f"no adapter named {name!r} is loaded{nearest_name(name, self.names)}")
        return self._fingerprints[name].encode()

    def check(self, request: Request) -> None:
        """Raise RuntimeProblem if a request's adapter is not loaded any more, or another one has its name now."""
        name = request.adapter
        if name is not None and not request.salt.endswith(self._fingerprints.get(name, "?").encode()):
            raise RuntimeProblem(f"the adapter {name!r} was unloaded meanwhile")

"""Models and adapters that come and go while the server runs."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from pydantic import Field

from ...system.errors import SmeltError
from ..engine.setup.loading import awaited_thread
from .http.errors import ApiError, no_such_model, refused
from .http.gate import RequestGate
from .model.loader import ModelLoader
from .model.models import ServedModels
from .model.served_model import ServedModel
from .openai.fields import Fields

_LOOK_SECONDS = 0.01
_UNLOADED = ApiError(
    503, "The request was aborted by the server, which unloads its model.", "service_unavailable_error"
)


class LoadModel(Fields):
    """``/models/load``, in the form of llama.cpp's server; without ``path``, a model that was served before."""

    model: str = Field(min_length=1)
    path: str | None = None


class UnloadModel(Fields):
    """``/models/unload``."""

    model: str


class LoadAdapter(Fields):
    """``/v1/load_lora_adapter``, in vLLM's form; without a base model, on the first one."""

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    base_model_name: str | None = None


class UnloadAdapter(Fields):
    """``/v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None


class Watches(Protocol):
    """What begins and ends to measure a model."""

    def add(self, model: ServedModel) -> None: ...

    def remove(self, model: ServedModel) -> None: ...


class Admin:
    """Loads and unloads, one at a time.

    Args:
        models: that are served.
        loader: None if nothing may be loaded.
        watches: learns of models that come and go.
        gate: whether the server drains.
        drain_seconds: how long requests may take after their model was unloaded.
    """

    def __init__(
        self,
        models: ServedModels,
        loader: ModelLoader | None,
        watches: Watches,
        gate: RequestGate,
        drain_seconds: float,
    ) -> None:
        self._models = models
        self._loader = loader
        self._watches = watches
        self._gate = gate
        self._drain_seconds = drain_seconds
        self._places = {model.name: model.path for model in models}
        self._one = asyncio.Lock()

    async def load(self, request: LoadModel) -> dict[str, Any]:
        """Load a model; other requests are served meanwhile.

        Raises:
            ApiError: its name is taken, there is no place for it, or it cannot be loaded.
        """
        async with self._one:
            loader = self._loader
            if loader is None:
                raise ApiError(400, "This server was not started by smelt serve, and loads no models.")
            self._gate.check_open()
            self._check_name(request.model)
            place = request.path or self._places.get(request.model)
            if place is None:
                raise ApiError(400, f"No model named {request.model!r} was served before; give its path.", param="path")
            count = sum(model.base is None for model in self._models)
            if count >= loader.share:
                raise ApiError(
                    409, f"{count} models share the memory, as many as max_models allows; unload one first, or start the server"
                    " with a higher --max-models.", "conflict_error",
                )  # fmt: skip
            began = time.perf_counter()
            try:
                found = await awaited_thread(partial(loader.load, request.model, place))
            except SmeltError as problem:
                raise refused(problem, "path") from None
            self._places[request.model] = found.path
            self._watches.add(found)
            self._models.add(found)
            return {"success": True, "model": found.name, "seconds": round(time.perf_counter() - began, 3)}

    async def unload(self, request: UnloadModel) -> dict[str, Any]:
        """Unload a model and its adapters: new requests do not find them, and those that run end first.

        Raises:
            ApiError: there is none of that name.
        """
        async with self._one:
            model = self._known(request.model)
            if model.base is not None:
                raise ApiError(
                    400, f"{model.name!r} is an adapter; unload it with /v1/unload_lora_adapter.", param="model"
                )
            gone = [*self._models.variants(model), model]
            for name in [each.name for each in gone]:
                self._models.remove(name)
            await self._unused(gone)
            self._watches.remove(model)
            engine = model.engine.loop
            del gone, model
            await asyncio.to_thread(engine.close)
            del engine
            # What serves a model refers to itself, and there may be as much memory in it as there is.
            await asyncio.to_thread(gc.collect)
            return {"success": True, "model": request.model}

    async def load_adapter(self, request: LoadAdapter) -> dict[str, Any]:
        """Load a LoRA adapter.

        Raises:
            ApiError: its name is taken, or it cannot be served beside the base model.
        """
        async with self._one:
            self._gate.check_open()
            self._check_name(request.lora_name)
            base = self._models.get(request.base_model_name)
            if base.base is not None:
                raise ApiError(
                    400, f"{base.name!r} is an adapter itself; name its base model.", param="base_model_name"
                )
            try:
                await awaited_thread(partial(base.engine.load_adapter, request.lora_name, request.lora_path))
            except SmeltError as problem:
                raise refused(problem, "lora_path") from None
            found = base.variant(request.lora_name)
            self._watches.add(found)
            self._models.add(found)
            return {"success": True, "model": found.name}

    async def unload_adapter(self, request: UnloadAdapter) -> dict[str, Any]:
        """Unload a LoRA adapter, once the requests that it serves have ended.

        Raises:
            ApiError: there is none of that name.
        """
        async with self._one:
            model = self._known(request.lora_name)
            if model.base is None:
                raise ApiError(400, f"{model.name!r} is no adapter; unload it with /models/unload.", param="lora_name")
            self._models.remove(model.name)
            await self._unused([model])
            # Those that were aborted leave the engine before its next step.
            await model.engine.loop.result(lambda: model.engine.unload_adapter(model.name))
            return {"success": True, "model": model.name}

    def _known(self, name: str) -> ServedModel:
        if name not in self._models:
            raise no_such_model(name, [model.name for model in self._models])
        return self._models.get(name)

    def _check_name(self, name: str) -> None:
        if name in self._models:
            raise ApiError(409, f"A model named {name!r} is served already; choose another name.", "conflict_error")

    async def _unused(self, gone: Sequence[ServedModel]) -> None:
        """Wait for requests of models that are served no more; abort those that take too long."""
        ends = time.monotonic() + self._drain_seconds
        while any(model.in_use for model in gone):
            if time.monotonic() > ends:
                for model in gone:
                    model.abort_all(_UNLOADED)
            await asyncio.sleep(_LOOK_SECONDS)

"""Models and adapters that are loaded and unloaded while the server runs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from smelt.runtime.engine.setup.config import EngineConfig
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.model.loader import ModelLoader
from smelt.system.hardware.device import free_memory

from ...tiny import SMELT_6M
from ..random_adapter import adapter_of
from .serving import Serving, serving

ADMIN = {"Authorization": "Bearer admin"}
ASK: dict[str, Any] = {"prompt": "The city of", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter")
    adapter_of(SMELT_6M, directory, target_modules="all-linear")
    return directory


@pytest.fixture
def fresh() -> Iterator[Serving]:
    """A server with one model, and memory for two."""
    loader = ModelLoader(EngineConfig(dtype="float32", max_num_seqs=8, quiet=True), share=2)
    with serving([loader.load("base", SMELT_6M)], ServerConfig(admin_keys=("admin",)), loader) as found:
        yield found


def post(server: Serving, path: str, body: dict[str, Any], **options: Any) -> httpx2.Response:
    return httpx2.post(f"{server.url}{path}", json=body, timeout=60, **({"headers": ADMIN} | options))


def text(server: Serving, model: str) -> str:
    found = post(server, "/v1/completions", {**ASK, "model": model})
    assert found.status_code == 200, found.text
    assert found.json()["model"] == model
    return str(found.json()["choices"][0]["text"])


def names(server: Serving) -> list[str]:
    return [each["id"] for each in httpx2.get(f"{server.url}/v1/models").json()["data"]]


def test_a_model_comes_and_goes(fresh: Serving) -> None:
    assert post(fresh, "/models/load", {"model": "other", "path": str(SMELT_6M)}).json()["success"]
    assert names(fresh) == ["base", "other"]
    assert text(fresh, "other") == text(fresh, "base")
    page = httpx2.get(f"{fresh.url}/metrics").text
    assert 'smelt:request_success_total{finished_reason="length",model_name="other"} 1.0' in page
    gone = weakref.ref(fresh.models.get("other").engine)
    full = post(fresh, "/models/load", {"model": "third", "path": str(SMELT_6M)})
    assert full.status_code == 409
    assert "max_models" in full.json()["error"]["message"]

    assert post(fresh, "/models/unload", {"model": "other"}).json()["success"]
    assert names(fresh) == ["base"]
    assert gone() is None, "its memory is given back"
    assert post(fresh, "/v1/completions", {**ASK, "model": "other"}).status_code == 404
    assert 'model_name="other"' not in httpx2.get(f"{fresh.url}/metrics").text
    # By its name alone, as it was served before.
    assert post(fresh, "/models/load", {"model": "other"}).json()["success"]
    assert text(fresh, "other")


def test_models_share_the_memory_evenly() -> None:
    little = 160e6 / free_memory(torch.device("cpu"))
    config = EngineConfig(dtype="float32", memory_utilization=little, quiet=True)
    alone = ModelLoader(config, share=1).load("a", SMELT_6M).engine.cache.blocks
    loader = ModelLoader(config, share=2)
    first, second = (loader.load(name, SMELT_6M).engine.cache.blocks for name in "ab")
    assert first == second
    assert 0 < first < alone / 2


def test_requests_keep_the_model_that_they_began_with(fresh: Serving) -> None:
    assert post(fresh, "/models/load", {"model": "other", "path": str(SMELT_6M)}).status_code == 200
    answers: list[httpx2.Response] = []

    def ask() -> None:
        answers.append(post(fresh, "/v1/completions", {**ASK, "max_tokens": 400, "model": "other"}))

    thread = threading.Thread(target=ask)
    thread.start()
    model = fresh.models.get("other")
    while not model.in_use:
        time.sleep(0.005)
    assert post(fresh, "/models/unload", {"model": "other"}).status_code == 200
    thread.join(60)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 400


def test_what_takes_too_long_after_unloading_is_aborted() -> None:
    loader = ModelLoader(EngineConfig(dtype="float32", max_num_seqs=8, quiet=True), share=1)
    config = ServerConfig(admin_keys=("admin",), drain_seconds=0)
    with serving([loader.load("base", SMELT_6M)], config, loader) as server:
        answers: list[httpx2.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(post(server, "/v1/completions", {**ASK, "max_tokens": 900}))
        )
        thread.start()
        while not server.models.get("base").in_use:
            time.sleep(0.005)
        assert post(server, "/models/unload", {"model": "base"}).status_code == 200
        thread.join(60)
        assert answers[0].status_code == 503
        assert "unloads its model" in answers[0].json()["error"]["message"]
        assert post(server, "/v1/completions", ASK).status_code == 503  # none is left
        said = post(server, "/v1/completions", ASK).json()["error"]["message"]
        assert "The default model, base, is not loaded" in said


def test_a_default_model_stays_the_default_while_it_is_not_loaded(fresh: Serving) -> None:
    assert post(fresh, "/models/load", {"model": "other", "path": str(SMELT_6M)}).status_code == 200
    assert post(fresh, "/models/unload", {"model": "base"}).status_code == 200
    assert post(fresh, "/v1/completions", ASK).status_code == 503
    assert post(fresh, "/v1/completions", {**ASK, "model": "other"}).status_code == 200
    assert post(fresh, "/models/load", {"model": "base"}).status_code == 200
    assert post(fresh, "/v1/completions", ASK).json()["model"] == "base"


def test_an_adapter_is_a_model_beside_its_base(fresh: Serving, adapter: Path) -> None:
    before = text(fresh, "base")
    loaded = post(fresh, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})
    assert loaded.status_code == 200, loaded.text
    entries = httpx2.get(f"{fresh.url}/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in entries] == [("base", None), ("mine", "base")]
    assert text(fresh, "mine") != before
    assert text(fresh, "base") == before
    vectors = [
        post(fresh, "/v1/embeddings", {"input": "a city", "model": name}).json()["data"][0]["embedding"]
        for name in ("base", "mine")
    ]
    assert vectors[0] != vectors[1]
    page = httpx2.get(f"{fresh.url}/metrics").text
    assert 'smelt:request_success_total{finished_reason="length",model_name="base"} 3.0' in page

    taken = post(fresh, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})
    assert taken.status_code == 409
    on_itself = {"lora_name": "two", "lora_path": str(adapter), "base_model_name": "mine"}
    assert "is an adapter itself" in post(fresh, "/v1/load_lora_adapter", on_itself).json()["error"]["message"]
    assert post(fresh, "/models/unload", {"model": "mine"}).status_code == 400
    assert post(fresh, "/v1/unload_lora_adapter", {"lora_name": "base"}).status_code == 400
    assert post(fresh, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 200
    assert names(fresh) == ["base"]
    assert post(fresh, "/v1/unload_lora_adapter", {"lora_name": "mine"}).status_code == 404


def test_a_model_takes_its_adapters_with_it(fresh: Serving, adapter: Path) -> None:
    post(fresh, "/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})
    assert post(fresh, "/models/unload", {"model": "base"}).status_code == 200
    assert names(fresh) == []


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/models/load", {"model": "other", "path": "./not-there"}, "not found"),
        ("/models/load", {"model": "other"}, "give its path"),
        ("/models/load", {"model": "other", "paht": "x"}, "paht"),
        ("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": "./not-there"}, "adapter_config.json"),
    ],
)
def test_what_cannot_be_loaded_is_refused(fresh: Serving, path: str, body: dict[str, str], says: str) -> None:
    found = post(fresh, path, body)
    assert found.status_code == 400
    assert says in found.json()["error"]["message"]
    assert names(fresh) == ["base"]


def test_only_an_admins_key_loads(fresh: Serving, server: Serving) -> None:
    body = {"model": "other", "path": str(SMELT_6M)}
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert post(fresh, "/models/load", body, headers=headers).status_code == 401
    off = post(server, "/models/load", body)
    assert off.status_code == 404
    assert "--admin-key" in off.json()["error"]["message"]

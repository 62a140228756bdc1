"""What an engine holds is free as soon as nobody has the engine: its parts do not keep each other until the garbage collector looks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams

_PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
_PROMPT = [5, 6, 7, 8, 5, 6, 7, 8]


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"native": False},
        {"dtype": "float32"},
        {"reproducible": True},
        {"host_cache_bytes": 1 << 20, "kv_cache_dtype": "int8"},
        {"offload": "disk", "memory_bytes": 1 << 26},
        {"drafter": "lookup"},
        {"drafter": "early-exit:1", "draft_tokens": 2},
        {"drafter": "lookup+model", "draft_tokens": 2, "draft_branches": 2},
    ],
    ids=str,
)
def test_an_engine_and_its_weights_go_with_the_last_reference(
    options: dict[str, Any], tiny: Callable[..., Path]
) -> None:
    path = tiny("llama", torch.bfloat16)
    if "drafter" in options:
        options = {**options, "drafter": options["drafter"].replace("model", str(path))}
    engine = Engine(path, quiet=True, max_model_len=128, max_num_seqs=4, **options)
    engine.generate([_PROMPT, _PROMPT], _PARAMS)
    seen = [weakref.ref(each) for each in (engine, engine.model, engine.executor)]
    del engine
    assert [each() for each in seen] == [None, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_an_engine_that_torch_compiled_goes_too(family: str, tiny: Callable[..., Path]) -> None:
    """With the next collection: what the compiler makes refers to itself."""
    engine = Engine(tiny(family, torch.bfloat16), quiet=True, max_model_len=128, max_num_seqs=4, compile=True)
    engine.generate([_PROMPT], _PARAMS)
    parts = engine.model.layers[0].linears()
    seen = [weakref.ref(each) for each in (engine, engine.model, *parts.values())]
    assert len(seen) > 5
    del engine, parts
    gc.collect()
    assert not [each() for each in seen if each() is not None]


@pytest.mark.usefixtures("no_collection")
def test_an_engine_that_was_stepped_by_its_thread_goes_after_it_is_closed(tiny: Callable[..., Path]) -> None:
    async def generate(engine: Engine) -> None:
        stream = engine.start(_PROMPT, _PARAMS)
        await stream.last()

    engine = Engine(tiny("llama", torch.bfloat16), quiet=True, max_model_len=128, max_num_seqs=4)
    asyncio.run(generate(engine))
    seen = [weakref.ref(each) for each in (engine, engine.model)]
    engine.close()
    del engine
    assert [each() for each in seen] == [None, None]


def test_a_loop_that_was_never_needed_is_closed_without_its_engine(tiny: Callable[..., Path]) -> None:
    engine = Engine(tiny(), quiet=True, max_model_len=128)
    loop = engine.loop
    del engine
    loop.close()
    assert loop.is_alive


def test_an_engine_stays_while_its_thread_steps_it(tiny: Callable[..., Path]) -> None:
    async def generate() -> int:
        stream = Engine(tiny(), quiet=True, max_model_len=128).start(_PROMPT, _PARAMS)
        gc.collect()
        return len((await stream.last()).outputs[0].token_ids)

    assert asyncio.run(generate()) == 4

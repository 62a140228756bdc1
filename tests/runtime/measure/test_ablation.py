"""What ``smelt bench --ablate`` counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import RuntimeProblem
from smelt.runtime.fusions import Fusions
from smelt.runtime.measure.ablation import EAGER, ablate, table

OPTIONS: dict[str, Any] = {"output": 4, "dtype": "bfloat16", "kv_cache_dtype": "auto", "log": lambda _: None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="times steps, too, where there is a GPU")
def test_a_row_for_each_fusion_and_none_that_saves_nothing(tiny: Callable[..., Path]) -> None:
    found = ablate(tiny("llama", torch.bfloat16, num_hidden_layers=2), prompt=48, **OPTIONS)
    assert [row.without for row in found.rows] == ["", *Fusions.names(), EAGER]
    whole, *others = found.rows
    # Seven in each of two layers; around them the tokens' lookup, embedding, last norm, head, and the choice.
    assert whole.launches <= 2 * 7 + 7
    assert whole.prompt_launches <= 2 * 9 + 7
    assert all(row.launches >= whole.launches and row.prompt_launches >= whole.prompt_launches for row in others)
    by_name = {row.without: row for row in others}
    assert by_name["storing"].launches == whole.launches + 2
    assert by_name["storing"].prompt_launches == whole.prompt_launches
    assert by_name[EAGER].moved > whole.moved
    assert by_name[EAGER].launches > 4 * whole.launches
    assert all(row.decode_seconds is None for row in found.rows)
    assert "there is no GPU" in table(found)


def test_a_prompt_that_the_model_cannot_take_is_said(tiny: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeProblem, match="prompt is 5000, more than the model's limit of 128 tokens"):
        ablate(tiny("llama", torch.bfloat16), prompt=5000, **OPTIONS)

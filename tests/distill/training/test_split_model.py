"""A model in two halves against transformers' own logits."""

from __future__ import annotations

import pytest
import torch
from smelt.distill.training.split_model import SplitModel

from ...tiny import CONFIGS, make_model

CHANGES = {"gemma2": {"final_logit_softcapping": 5.0}}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_both_halves_make_the_logits_of_the_whole(architecture: str) -> None:
    model = make_model(architecture, torch.float32, **CHANGES.get(architecture, {})).eval()
    tokens = torch.randint(2, 4096, (2, 9), generator=torch.Generator().manual_seed(0))
    split = SplitModel(model)
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        hidden = split.hidden(tokens)
        found = split.logits(hidden, split.head.weight, split.head.bias)
        again = model(input_ids=tokens).logits
    torch.testing.assert_close(found, whole)
    assert torch.equal(again, whole)  # nothing is left exchanged

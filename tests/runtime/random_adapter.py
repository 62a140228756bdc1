"""Random LoRA adapters, as peft saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM


def adapter_of(path: Path, directory: Path, seed: int = 3, size: float = 0.2, **settings: Any) -> Any:
    """A random adapter on a plain checkpoint, saved; returns peft's model with it unmerged."""
    peft = pytest.importorskip("peft", reason="needs peft, which is in the dev extra")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=6, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    model.save_pretrained(directory)
    return model.eval()

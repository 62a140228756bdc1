"""Llama shapes of any size with seeded random weights: what memory and speed are measured on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from smelt.models.checkpoint.writer import write_checkpoint
from smelt.system.storage.tensor_files import TensorInfo

from .common import SMELT_6M


@dataclass(frozen=True)
class RandomShape:
    """The sizes of a Llama, the feed-forward part's under ``wide``."""

    hidden: int
    wide: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool = True
    positions: int = 1024

    @property
    def block_bytes(self) -> int:
        """Of one block, in bfloat16."""
        shared = self.hidden * self.key_value_heads // self.heads
        return 2 * (2 * self.hidden * self.hidden + 2 * self.hidden * shared + 3 * self.hidden * self.wide)


SMALL = RandomShape(hidden=1024, wide=3072, heads=16, key_value_heads=4, vocabulary=4096)
BIG = RandomShape(hidden=2048, wide=8192, heads=32, key_value_heads=8, vocabulary=32000, tied=False, positions=4096)


def build(directory: Path, blocks: int, shape: RandomShape = SMALL) -> int:
    """Write a model of ``blocks`` random blocks, with smelt-6m's tokenizer; returns its bytes."""
    config = json.loads((SMELT_6M / "config.json").read_text()) | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "num_hidden_layers": blocks,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.positions,
    }
    hidden, wide, shared = shape.hidden, shape.wide, shape.hidden * shape.key_value_heads // shape.heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocabulary, hidden)
    for i in range(blocks):
        at = f"model.layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        shapes |= {at + f"self_attn.{n}_proj.weight": (shared, hidden) for n in "kv"}
        shapes |= {at + f"mlp.{n}_proj.weight": (wide, hidden) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (hidden, wide)}
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}

    def random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(_seed_of(name))
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16) / shape[1] ** 0.5

    entries = [
        (name, TensorInfo(torch.bfloat16, size), lambda name=name, size=size: random(name, size))
        for name, size in shapes.items()
    ]
    write_checkpoint(directory, SMELT_6M, config, entries, shard_bytes=500_000_000)
    return sum(info.nbytes for _, info, _ in entries)


def build_billion(scratch: Path) -> Path:
    """The model of 1.1 billion weights that speed on a CPU is measured on, written to ``scratch/bf16`` if it is not there."""
    directory = scratch / "bf16"
    if not (directory / "config.json").is_file():
        build(directory, 16, BIG)
    return directory


def _seed_of(name: str) -> int:
    """Does not change from run to run."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % (1 << 31)

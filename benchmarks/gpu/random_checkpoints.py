"""Checkpoints of known sizes with random weights, written in seconds: speed does not ask what weights mean."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 128
FORMATS = ("bf16", "w4a16", "w4a16 and an int8 head", "fp8")


@dataclass(frozen=True)
class CheckpointSize:
    """Of a Llama or a Qwen3.

    Attributes:
        name: for people.
        kind: ``llama`` or ``qwen3``.
        hidden, wide, layers, queries, shared, head, vocabulary: as their names say; ``shared`` are heads of keys and values.
        tied: whether the head is the embedding.
    """

    name: str
    kind: str
    hidden: int
    wide: int
    layers: int
    queries: int
    shared: int
    head: int
    vocabulary: int
    tied: bool

    def linears(self) -> list[tuple[str, int, int]]:
        """Those of a layer, with their rows and columns."""
        queries, shared = self.queries * self.head, self.shared * self.head
        return [
            ("self_attn.q_proj", queries, self.hidden),
            ("self_attn.k_proj", shared, self.hidden),
            ("self_attn.v_proj", shared, self.hidden),
            ("self_attn.o_proj", self.hidden, queries),
            ("mlp.gate_proj", self.wide, self.hidden),
            ("mlp.up_proj", self.wide, self.hidden),
            ("mlp.down_proj", self.hidden, self.wide),
        ]

    def config(self) -> dict[str, Any]:
        """For ``config.json``."""
        architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.kind]
        return {
            "architectures": [architecture],
            "model_type": self.kind,
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.wide,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.queries,
            "num_key_value_heads": self.shared,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


LLAMA = CheckpointSize("Llama-3-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False)
QWEN = CheckpointSize("Qwen3-0.6B", "qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True)
TINY = replace(QWEN, name="tiny Qwen3", hidden=128, wide=128, layers=1, queries=2, shared=1, head=64, vocabulary=128)
TINY_LLAMA = replace(TINY, name="tiny Llama", kind="llama", tied=False)


def write(folder: Path, size: CheckpointSize, stored: str, device: torch.device) -> Path:
    """A checkpoint of :data:`FORMATS`.

    Args:
        folder: an existing one, in which it gets its own.
        size: of the model.
        stored: its format.
        device: where random numbers are drawn.

    Returns:
        Its folder.
    """
    path = folder / f"{size.name} {stored}".replace(" ", "-")
    path.mkdir()
    draw = torch.Generator(device).manual_seed(0)

    def plain(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=draw, device=device, dtype=torch.bfloat16)
        return drawn.mul_(columns**-0.5).cpu()

    def linear(name: str, rows: int, columns: int, bits: str) -> dict[str, Tensor]:
        return {f"{name}.{part}": value.cpu() for part, value in _linear(rows, columns, bits, draw).items()}

    bits = {"bf16": "16", "fp8": "fp8"}.get(stored, "4")
    head = "8" if stored.endswith("head") else "16"
    ends = {"model.embed_tokens.weight": plain(size.vocabulary, size.hidden), "model.norm.weight": _ones(size.hidden)}
    if not size.tied:
        ends |= linear("lm_head", size.vocabulary, size.hidden, head)
    shards = {"model-ends.safetensors": ends}
    home = {name: file for file, tensors in shards.items() for name in tensors}
    save_file(ends, path / "model-ends.safetensors")
    del ends, shards
    for i in range(size.layers):
        at, tensors = f"model.layers.{i}.", dict[str, Tensor]()
        for name, rows, columns in size.linears():
            tensors |= linear(at + name, rows, columns, bits)
        tensors |= {f"{at}{name}_layernorm.weight": _ones(size.hidden) for name in ("input", "post_attention")}
        if size.kind == "qwen3":
            tensors |= {f"{at}self_attn.{name}_norm.weight": _ones(size.head) for name in "qk"}
        file = f"model-{i}.safetensors"
        save_file(tensors, path / file)
        home |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    config = size.config()
    if bits != "16":
        config["quantization_config"] = _quantization(bits, head)
    (path / "config.json").write_text(json.dumps(config))
    return path


def once(folder: Path | None, size: CheckpointSize, stored: str, device: torch.device) -> Path:
    """The same, written only if it does not exist; it stays as long as the folder.

    Args:
        folder, size, stored, device: see :func:`write`; without a folder, one is made.
    """
    place = Path(tempfile.mkdtemp()) if folder is None else folder
    path = place / f"{size.name} {stored}".replace(" ", "-")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=place) as partial:
            write(Path(partial), size, stored, device).rename(path)
    return path


def dense(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of :func:`write` as plain float32 numbers, by arithmetic of its own.

    Args:
        checkpoint: its folder.
    """
    found = dict[str, Tensor]()
    for file in sorted(checkpoint.glob("*.safetensors")):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            stem, _, part = name.rpartition(".")
            if part == "weight_packed":
                rows, columns = tensors[f"{stem}.weight_shape"].tolist()
                each = 32 * tensor.shape[1] // columns
                shifts = torch.arange(0, 32, each)
                codes = (tensor.unsqueeze(-1) >> shifts & 2**each - 1).flatten(1)[:, :columns] - 2 ** (each - 1)
                scale = tensors[f"{stem}.weight_scale"].float()
                found[f"{stem}.weight"] = (codes.view(rows, scale.shape[1], -1) * scale.unsqueeze(-1)).flatten(1)
            elif part == "weight":
                scale = tensors.get(f"{stem}.weight_scale")
                found[name] = tensor.float() if scale is None else tensor.float() * scale.float()
    return found


def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _linear(rows: int, columns: int, bits: str, draw: torch.Generator) -> dict[str, Tensor]:
    """A weight as compressed-tensors stores it; its numbers' spread is one over the root of the columns."""
    device = draw.device
    if bits in ("16", "fp8"):
        weight = torch.randn(rows, columns, generator=draw, device=device, dtype=torch.bfloat16)
        if bits == "16":
            return {"weight": weight.mul_(columns**-0.5)}
        scale = torch.full((rows, 1), columns**-0.5 / 64, dtype=torch.bfloat16, device=device)
        return {"weight": weight.mul_(64).to(torch.float8_e4m3fn), "weight_scale": scale}
    count, spread = int(bits), (2 ** int(bits)) / 12**0.5
    words = torch.randint(-(2**31), 2**31, (rows, columns * count // 32), generator=draw, device=device)
    if bits == "4":
        # The lowest code has no counterpart: with it all sums have a part in common, beside which errors grow large.
        least = ~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111
        words |= least << 3
    groups = columns // GROUP if bits == "4" else 1
    scale = torch.full((rows, groups), columns**-0.5 / spread, dtype=torch.bfloat16, device=device)
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([rows, columns]),
    }


def _quantization(bits: str, head: str) -> dict[str, Any]:
    common = {"symmetric": True, "dynamic": False}
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, **common}
    eight = {"num_bits": 8, "type": "float", "strategy": "channel", **common}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    weights, taken = (eight, inputs) if bits == "fp8" else (four, None)
    blocks = {"targets": ["Linear"], "weights": weights, "input_activations": taken}
    if head == "8":
        blocks["targets"] = [r"re:model\.layers\..*_proj$"]
    groups = {"group_0": blocks}
    if head == "8":
        last = {"num_bits": 8, "type": "int", "strategy": "channel", **common}
        groups["group_1"] = {"targets": ["re:lm_head$"], "weights": last, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if bits == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [] if head == "8" else ["lm_head"],
    }

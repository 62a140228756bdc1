"""Checkpoints whose codes, scales and zero-points are known, or made of a model in one stroke."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from smelt.quant.activations import ActivationRounding
from smelt.quant.rounding.nearest import nearest
from smelt.quant.scheme import Scheme, resolve
from smelt.quant.stored.config import quantization_config
from torch import Tensor


class Coded:
    """A checkpoint of random codes, scales and zero-points, and the float64 weights that they mean."""

    def __init__(self, path: Path, changed: dict[str, dict[str, Any]] | None = None, **usual: Any) -> None:
        self.path = path
        self.meant: dict[str, np.ndarray] = {}
        generator = torch.Generator().manual_seed(7)
        tensors = load_file(path / "model.safetensors")
        groups: dict[str, dict[str, Any]] = {}
        for name in sorted(name.removesuffix(".weight") for name in tensors if "_proj" in name):
            said = usual | (changed or {}).get(name, {})
            if said.pop("plain", False):
                continue
            self._code(tensors, name, generator, **said)
            args = {key: said[key] for key in ("bits", "group", "symmetric")}
            groups.setdefault(json.dumps(args), {"targets": [], "weights": _arguments(**args)})["targets"].append(name)
        save_file(tensors, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups.values())},
        }
        (path / "config.json").write_text(json.dumps(config))

    def _code(
        self,
        tensors: dict[str, Tensor],
        name: str,
        generator: torch.Generator,
        bits: int,
        group: int,
        symmetric: bool = True,
        lowest: int = 1,
        dtype: torch.dtype = torch.float16,
        order: bool = False,
    ) -> None:
        rows, columns = tensors.pop(f"{name}.weight").shape
        width, half = columns if group == -1 else group, 2 ** (bits - 1)
        codes = torch.randint(-half, half, (rows, columns), generator=generator, dtype=torch.int8)
        scale = (torch.rand(rows, columns // width, generator=generator) * 0.02 + 0.01).mul(2.0 ** (4 - bits)).to(dtype)
        zeros = torch.randint(lowest - half, half, scale.shape, generator=generator, dtype=torch.int8)
        places = torch.arange(columns) // width
        if order:
            places = places[torch.randperm(columns, generator=generator)]
            tensors[f"{name}.weight_g_idx"] = places.int()
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).contiguous()
        tensors[f"{name}.weight_packed"] = pack_to_int32(codes, bits)
        tensors[f"{name}.weight_scale"] = scale
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])
        wide = codes.double() - (0 if symmetric else zeros.double()[:, places])
        self.meant[name] = (wide * scale.double()[:, places]).numpy()


def _arguments(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    found = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    return found | ({"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group})


def compressed(path: Path, scheme: str, group: int | None = None) -> Path:
    """A model directory with all linears but the head rounded to a scheme, in place."""
    settled = resolve(scheme, group)
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if "_proj.weight" not in name and not re.search(r"experts\.\d+\.w\d\.weight", name):
            tensors[name] = weight
            continue
        base = name.removesuffix("weight")
        schemes[base.removesuffix(".")] = settled
        if settled.activations is not None:
            low, high = torch.tensor(-3.5), torch.tensor(4.0)
            inputs = ActivationRounding.observed(settled.activations, low, high, weight.dtype)
            tensors |= {base + local: t.clone() for local, t in inputs.stored().items()}
        tensors |= {base + local: t for local, t in nearest(weight, settled.args).stored(settled).items()}
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config(schemes, ["lm_head", "re:.*gate$"])
    (path / "config.json").write_text(json.dumps(config))
    return path

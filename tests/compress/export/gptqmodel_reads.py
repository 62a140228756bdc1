"""Run by the Python that has GPTQModel: load checkpoints with it, or through transformers, and save what they compute.

    python gptqmodel_reads.py REQUEST.json

The request names prompts (token ids), the result's file and, for each checkpoint, who loads it. The result holds logits,
and each quantized linear's weight, read by putting the unit matrix through the linear: exact in any kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def loaded(path: str, by: str) -> Any:
    """The model, in float16 on the CPU."""
    if by == "transformers":
        from transformers import AutoConfig, AutoModelForCausalLM, AwqConfig, GPTQConfig

        # Its own choice multiplies in bfloat16; these kernels keep float16.
        awq = AutoConfig.from_pretrained(path).quantization_config["quant_method"] == "awq"
        kernel = AwqConfig(backend="torch_awq") if awq else GPTQConfig(bits=4, backend="gptq_torch")
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16, quantization_config=kernel)
    from gptqmodel import BACKEND, GPTQModel

    return GPTQModel.load(path, backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model


def main(request: dict[str, Any]) -> None:
    """Answer one request."""
    found: dict[str, torch.Tensor] = {}
    for key, (path, by) in request["checkpoints"].items():
        model = loaded(path, by)
        with torch.no_grad():
            found[f"{key}|logits"] = model(torch.tensor(request["prompt"])).logits.float()
            for name, module in model.named_modules():
                if hasattr(module, "qweight"):
                    unit = torch.eye(module.in_features, dtype=torch.float16)
                    found[f"{key}|{name}"] = module(unit).T.contiguous()
    save_file(found, request["result"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

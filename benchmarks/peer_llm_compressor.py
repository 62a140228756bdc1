"""One GPTQ job by llm-compressor, measured; run by against_llm_compressor.py in the peer's own environment.

Prints one JSON line. Windows are given as a JSON file of token ids, so that both tools read the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def peak() -> float:
    """Largest resident memory of this process so far, in MB (getrusage would count the parent's too)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--calibration", "--output", "--dtype"):
        parser.add_argument(name, required=True)
    parser.add_argument("--evaluation")
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    args = parser.parse_args()

    begun = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # its log goes to standard output
        import datasets
        import llmcompressor
        import torch
        import transformers
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
    imported, after_import = time.perf_counter(), peak()

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    with open(args.calibration) as file:
        windows = json.load(file)
    data = datasets.Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]})
    grain = {"strategy": "group", "group_size": args.group_size}
    weights = QuantizationArgs(num_bits=args.bits, type="int", symmetric=True, **grain)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        model = oneshot(
            model=model,
            tokenizer=tokenizer,
            recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
            dataset=data,
            num_calibration_samples=len(windows),
            max_seq_length=len(windows[0]),
            shuffle_calibration_samples=False,
        )
    quantized = time.perf_counter()
    codes = {}
    for name, module in model.named_modules():
        if getattr(getattr(module, "quantization_scheme", None), "weights", None) is not None:
            scheme = module.quantization_scheme.weights
            scale = module.weight_scale.detach().clone()
            codes[name] = (quantize(module.weight.detach(), scale, None, scheme, dtype=torch.int8), scale, scheme)
    saving = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        model.save_pretrained(args.output, save_compressed=True)
    saved, at_peak = time.perf_counter(), peak()

    perplexity = None
    if args.evaluation:
        plain = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        layers = dict(plain.named_modules())
        losses = []
        with open(args.evaluation) as file, torch.no_grad():
            for name, (code, scale, scheme) in codes.items():
                layers[name].weight.copy_(dequantize(code, scale.float(), None, args=scheme))
            for window in json.load(file):
                ids = torch.tensor([window])
                logits = plain(ids, use_cache=False).logits[0, :-1].float()
                losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
        perplexity = math.exp(sum(losses) / len(losses))
    print(
        json.dumps(
            {
                "perplexity": perplexity,
                "quantize_seconds": round(quantized - start + saved - saving, 2),
                "import_seconds": round(imported - begun, 2),
                "peak_mb": round(at_peak, 1),
                "import_mb": round(after_import, 1),
                "versions": {
                    "llm-compressor": llmcompressor.__version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                },
            }
        )
    )


if __name__ == "__main__":
    main()

"""One job by llm-compressor, measured; run by the peer's own interpreter. Prints one JSON line.

    PEER/bin/python benchmarks/peers/quantize_llm_compressor.py --model DIR --tokens FILE --method gptq --bits 3 --group-size 128 --out DIR

A method is any transforms and one rounding, joined by "+": awq, smoothquant, spinquant, quip; then rtn or
gptq. ``--set gptq.actorder=null`` sets a field of a part. With ``--activations`` the activations get as many
bits as the weights, one scale a token ("dynamic") or a tensor ("static"). A dense checkpoint holds weights alone, so
``--evaluation`` gives the perplexity of the peer's own model, with its activations quantized and its online
rotations running. ``--without-data`` gives it no text. ``--packed`` writes the peer's own checkpoint instead of a dense one and counts the time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from job import PeerJob, perplexity, read_tokens, run_job

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

TRANSFORMS = ("awq", "smoothquant", "spinquant", "quip")
ROUNDINGS = ("rtn", "gptq")


def work(job: PeerJob) -> dict[str, Any]:
    """Quantize with llm-compressor and hand back what its codes mean."""
    with job.stage("import"):
        import torch
        import transformers
        from llmcompressor import oneshot

        kinds = modifiers()
    given = job.arguments
    with job.stage("load"):
        model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=given.dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    reading = {} if given.without_data else text_of(job, tokenizer)
    recipe = recipe_of(job, kinds)

    with job.stage("quantize"):
        model = oneshot(model=model, recipe=recipe, **reading)
    stated: dict[str, Any] = {"settings": {"activations": given.activations, "dtype": given.dtype, **job.options}}
    if given.packed:
        with job.stage("pack"):
            model.save_pretrained(given.packed, save_compressed=True)
        return stated
    with torch.no_grad():
        model.float()
        if given.evaluation:
            stated["own_perplexity"] = perplexity(model, read_tokens(given.evaluation))
        weights = dict(model.state_dict())
        for name, module in model.named_modules():
            if getattr(module, "quantization_scheme", None) is not None:
                weights[f"{name}.weight"] = effective(module)
    job.write_dense(weights, tied=model.config.tie_word_embeddings)
    return stated


def modifiers() -> dict[str, Any]:
    """llm-compressor's class of every transform and rounding; imports what quantizing needs, where that is timed."""
    import datasets  # noqa: F401
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import QuIPModifier, SpinQuantModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    kinds = {"awq": AWQModifier, "smoothquant": SmoothQuantModifier, "spinquant": SpinQuantModifier}
    return kinds | {"quip": QuIPModifier, "rtn": QuantizationModifier, "gptq": GPTQModifier}


def text_of(job: PeerJob, tokenizer: Any) -> dict[str, Any]:
    """The arguments that give ``oneshot`` the calibration windows."""
    import datasets

    windows = job.windows().tolist()
    masks = [[1] * len(window) for window in windows]
    return {
        "tokenizer": tokenizer,
        "dataset": datasets.Dataset.from_dict({"input_ids": windows, "attention_mask": masks}),
        "batch_size": job.batch_size,
        "num_calibration_samples": len(windows),
        "max_seq_length": len(windows[0]),
        "shuffle_calibration_samples": False,
    }


def recipe_of(job: PeerJob, kinds: dict[str, Any]) -> list[Any]:
    """The method's transforms and its rounding, in order, from llm-compressor's class of each."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    grain = {"strategy": "group", "group_size": job.group_size} if job.group_size > 0 else {"strategy": "channel"}
    observer = {} if job.arguments.observer is None else {"observer": job.arguments.observer}
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=job.bits, type="int", symmetric=True, **grain, **observer),
        input_activations=activations(job.arguments.activations, job.bits, QuantizationArgs),
    )
    *transforms, rounding = job.method.split("+")
    if rounding not in ROUNDINGS or not set(transforms) <= set(TRANSFORMS):
        raise SystemExit(f"--method {job.method}: write transforms of {TRANSFORMS}, then one of {ROUNDINGS}")
    if stray := [key for key in job.options if key.partition(".")[0] not in (*transforms, rounding)]:
        raise SystemExit(f"--set {stray[0]}: write PART.FIELD=JSON, with a part of {job.method}")
    recipe = [kinds[name](**part(job, name)) for name in transforms]
    recipe.append(kinds[rounding](config_groups={"all": scheme}, ignore=["lm_head"], **part(job, rounding)))
    return recipe


def activations(kind: str, bits: int, args: Any) -> Any:
    """How inputs of linears are quantized."""
    if kind == "none":
        return None
    if kind == "dynamic":
        return args(num_bits=bits, type="int", symmetric=True, strategy="token", dynamic=True)
    return args(num_bits=bits, type="int", symmetric=True, strategy="tensor", dynamic=False)


def part(job: PeerJob, name: str) -> dict[str, Any]:
    """The options that are meant for one part of the method."""
    return {key.partition(".")[2]: value for key, value in job.options.items() if key.startswith(f"{name}.")}


def effective(module: Module) -> Tensor:
    """The matrix that a quantized linear multiplies by: its weight as quantized, and its online rotations if it has any.

    Read off the module's answer to unit vectors, while its activations are left alone.
    """
    import torch
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    weight: Any = module.weight
    weight.data = forward_quantize(module, weight.data, "weight", module.quantization_scheme.weights)  # pyright: ignore
    module.quantization_enabled = False  # pyright: ignore
    answer = module(torch.eye(weight.shape[1]))
    bias = getattr(module, "bias", None)
    return (answer if bias is None else answer - bias).T.contiguous()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What only this peer takes."""
    parser.add_argument("--observer", help="what finds scales, such as memoryless_mse; the default takes ranges")
    parser.add_argument("--activations", choices=("none", "dynamic", "static"), default="none")
    parser.add_argument(
        "--evaluation", type=Path, help="safetensors file with the windows to judge the peer's model on"
    )
    parser.add_argument("--without-data", action="store_true", help="give no calibration text; rtn alone needs none")
    parser.add_argument("--packed", type=Path, help="directory of the peer's own checkpoint")
    parser.add_argument("--dtype", default="auto")


if __name__ == "__main__":
    run_job(
        work,
        f"any of {', '.join(TRANSFORMS)}, then one of {', '.join(ROUNDINGS)}, joined by +",
        ("llmcompressor", "compressed-tensors"),
        add_arguments,
    )

"""One job by AutoRound, measured; run by the peer's own interpreter. Prints one JSON line.

    PEER/bin/python benchmarks/peers/quantize_autoround.py --model DIR --tokens FILE --method signround --bits 3 --group-size 128 --out DIR

Methods are AutoRound's own names of algorithms, joined by "+": signround (200 steps a block), rtn (nearest, with
scales searched under activation weights), awq+rtn, awq+signround. ``--set`` names their settings: ``iters=1000``,
``enable_alg_ext=true``, ``disable_opt_rtn=true``.
"""

from __future__ import annotations

from typing import Any

from job import PeerJob, run_job


def work(job: PeerJob) -> dict[str, Any]:
    """Quantize with AutoRound and hand back what its codes mean."""
    with job.stage("import"):
        import torch
        import transformers
        from auto_round import AutoRound

    with job.stage("load"):
        model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    windows = job.windows()
    rounder = AutoRound(
        model,
        tokenizer,
        scheme={"bits": job.bits, "group_size": job.group_size, "sym": True, "data_type": "int", "act_bits": 16},
        alg_configs=job.method.split("+"),
        dataset=list(windows.split(job.batch_size)),
        seqlen=windows.shape[1],
        nsamples=len(windows),
        batch_size=job.batch_size,
        device_map="cpu",
        **job.options,
    )
    with job.stage("quantize"):
        quantized, _ = rounder.quantize()

    weights = dict(quantized.state_dict())
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if isinstance(module, torch.nn.Linear) and getattr(module, "scale", None) is not None:
                weights[f"{name}.weight"] = exact(module.weight, module.scale)
    job.write_dense(weights, tied=quantized.config.tie_word_embeddings)
    return {"settings": job.options}


def exact(weight: Any, scale: Any) -> Any:
    """Multiples of the scales in float32, which AutoRound has rounded to the checkpoint's dtype."""
    grouped = weight.float().reshape(len(weight), scale.shape[1], -1)
    scale = scale.float()[:, :, None]
    return ((grouped / scale).round() * scale).reshape(weight.shape)


if __name__ == "__main__":
    run_job(work, "algorithms of AutoRound, joined by +", ("auto-round",))

"""One job by GPTQModel, measured; run by the peer's own interpreter. Prints one JSON line.

    PEER/bin/python benchmarks/peers/quantize_gptqmodel.py --model DIR --tokens FILE --method gptq --bits 3 --group-size 128 --out DIR

Methods:
    rtn: nearest codes, no calibration.
    gptq: the default: symmetric, columns ordered by activation within what a group allows ("act_group_aware").
    gptq-plain: columns in their own order.
    gptq-desc-act: columns by activation, groups cut in that order ("desc_act").
    gptaq, foem: GPTQ against the unquantized model's inputs, and with first-order errors.

``--set`` names fields of its GPTQConfig, such as ``mse=2.4`` (searched scales) or ``damp_percent=0.01``.
"""

from __future__ import annotations

import os
from typing import Any

from job import PeerJob, run_job

# Its pool of model loaders wants two workers, and on two cores it makes one: 7.6.0 then raises when it loads a model.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {},
    "gptq": {},
    "gptq-plain": {"act_group_aware": False},
    "gptq-desc-act": {"desc_act": True, "act_group_aware": False},
    "gptaq": {"gptaq": {}},
    "foem": {"foem": {}},
}


def work(job: PeerJob) -> dict[str, Any]:
    """Quantize with GPTQModel and hand back what its packed codes mean."""
    with job.stage("import"):
        import gptqmodel
        import torch
        from gptqmodel.nn_modules.qlinear import BaseQuantLinear
        from gptqmodel.quantization.config import FOEMConfig, GPTAQConfig, RTNConfig

    options = METHODS[job.method] | job.options
    # The second version of the format: the first stores zero points one less, and its unpacked weights are wrong until reloaded.
    common = {
        "format": "gptq_v2",
        "bits": job.bits,
        "group_size": job.group_size,
        "sym": True,
        "device": "cpu",
        "offload_to_disk": False,
    }
    for name, kind in (("gptaq", GPTAQConfig), ("foem", FOEMConfig)):
        if name in options:
            options[name] = kind(**options[name])
    settings = (RTNConfig if job.method == "rtn" else gptqmodel.GPTQConfig)(**common, **options)
    with job.stage("load"):
        model = gptqmodel.GPTQModel.load(str(job.model), settings)
    windows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in job.windows()]
    with job.stage("quantize"):
        model.quantize(None if job.method == "rtn" else windows, batch_size=job.batch_size)

    weights = dict(model.model.state_dict())
    with torch.no_grad():
        for name, module in model.model.named_modules():
            if isinstance(module, BaseQuantLinear):
                module.post_init()
                module.scales = module.scales.float()
                weights[f"{name}.weight"] = module.dequantize_weight().T
    job.write_dense(weights, tied=model.model.config.tie_word_embeddings)
    return {"settings": {name: str(value) for name, value in options.items()}}


if __name__ == "__main__":
    run_job(work, ", ".join(METHODS), ("gptqmodel",))

"""What each choice that `smelt plan` offers loses on smelt-6m: the order of "least compressed" in `runtime/plan/losses.py`.

    OMP_NUM_THREADS=1 python -m benchmarks.quantization.format_losses

KL divergence from the original on the builtin evaluation text, with GPTQ and the builtin calibration text, seed 0. W2A16 with its head
takes some minutes, the others seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from smelt.compress import Recipe, run

from ..common import parser, save

NAME = "format_losses"
SCHEMES = ("W8A16", "W8A8", "FP8_DYNAMIC", "W4A16", "NVFP4", "W3A16", "W2A16")
CACHES = ("int8", "fp8", "int4")
BLOCKS = (1, 2)


def main() -> None:
    """Measure, print, and keep."""
    parser(__doc__).parse_args()
    steps: dict[str, dict[str, Any]] = {}
    for scheme in SCHEMES:
        steps[scheme] = {"quantize": {"scheme": scheme, "rounding": "gptq", "ignore": ["lm_head"]}}
        steps[f"{scheme}, head too"] = {"quantize": {"scheme": scheme, "rounding": "gptq", "ignore": []}}
    for cache in CACHES:
        # All linears are ignored, so that the cache alone is quantized.
        steps[f"{cache} cache"] = {"quantize": {"scheme": "W8A16", "ignore": ["Linear", "lm_head"], "kv_cache": cache}}
    for count in BLOCKS:
        steps[f"{count} blocks dropped"] = {"prune": {"structure": "blocks", "count": count}}
    found: dict[str, float] = {}
    for name, step in steps.items():
        found[name] = _loss(step)
        print(name, found[name], flush=True)
    save(NAME, "OMP_NUM_THREADS=1 python -m benchmarks.quantization.format_losses", found)


def _loss(step: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        recipe = {
            "model": "builtin:smelt-6m",
            "output": str(Path(scratch) / "out"),
            "calibrate": {"source": "builtin", "samples": 64, "length": 256},
            "steps": [step],
            "evaluate": {"text": "builtin", "windows": 64, "length": 256, "speed": False},
        }
        made = run(Recipe.model_validate(recipe), progress=False).report.models[1]
    assert made.against is not None
    assert made.against.kl is not None
    return made.against.kl


if __name__ == "__main__":
    main()

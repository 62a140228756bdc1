"""Do the methods stand in the order that their papers found? Two trained models, real text, three calibration seeds.

    python -m benchmarks.quantization.orderings [--part few-bits|four-bit-inputs|gptq-options|outliers]

``few-bits``: weights of 4, 3 and 2 bits, by every rounding. ``four-bit-inputs``: W4A4, with and without
rotations and smoothing. ``gptq-options``: GPTQ with one option changed. ``outliers``: static W8A8. Four-bit inputs and outliers also of a twin of smelt-6m that computes the same, whose
norms' outputs have outliers. Each cell's mean and spread are over the seeds, which draw the calibration windows (and the
rotation); methods that read no calibration text run once. Rows that the result's file holds are not measured again, so a
run that was cut goes on; delete the file to start over. Needs ../shared.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from smelt.compress import Recipe, run

from ..common import C4, SMELT_6M, WIKITEXT_TEST, ResultRows, parser, shared

NAME = "orderings"
SEEDS = (0, 1, 2)
SMELT, STORIES = "smelt-6m", "stories260K"
OUTLIERS = "smelt-6m with outliers"
# A power of two: the twin's weights are the original's, exactly.
FACTOR, EVERY = 64.0, 37


@dataclass(frozen=True)
class ComparedMethod:
    """One method on one model, at one format.

    Attributes:
        label: what the table calls the method.
        settings: of the quantize step.
        reads_text: whether calibration windows, and so the seed, matter to it.
    """

    part: str
    model: str
    label: str
    settings: dict[str, Any] = field(hash=False)
    reads_text: bool = True

    @property
    def format(self) -> str:
        size = self.settings.get("group_size")
        return f"{self.settings['scheme']}{'' if size is None else f' g{size}'}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.format, self.label


def cells() -> Iterator[ComparedMethod]:
    """Everything that is measured."""
    signround = {"method": "signround", "iterations": 200}
    few: list[tuple[str, Any, list[Any], bool]] = [
        ("nearest", "nearest", [], False),
        ("nearest, scales searched", {"method": "nearest", "scale_search": True}, [], True),
        ("clip + nearest", "nearest", ["clip"], True),
        ("hqq", "hqq", [], False),
        ("awq + nearest", "nearest", ["awq"], True),
        ("gptq, plain scales", {"method": "gptq", "scale_search": False}, [], True),
        ("gptq", "gptq", [], True),
        ("gptq, half error-aware", {"method": "gptq", "error_aware": 0.5}, [], True),
        ("awq + gptq", "gptq", ["awq"], True),
        ("rotate + gptq", "gptq", ["rotate"], True),
        ("signround", signround, [], True),
    ]
    for scheme, group in (("W2A16", 64), ("W3A16", 128), ("W2A16", 128), ("W3A16", 64), ("W4A16", 128)):
        for label, rounding, transforms, reads in few:
            settings = {"scheme": scheme, "group_size": group, "rounding": rounding, "transforms": transforms}
            yield ComparedMethod("few-bits", SMELT, label, settings, reads)
    for scheme in ("W4A16", "W3A16", "W2A16"):
        for label, rounding, transforms, reads in few:
            if "rotate" not in transforms:
                settings = {"scheme": scheme, "group_size": -1, "rounding": rounding, "transforms": transforms}
                yield ComparedMethod("few-bits", STORIES, label, settings, reads)
    four: list[tuple[str, Any, list[Any], bool]] = [
        ("nearest", "nearest", [], False),
        ("gptq", "gptq", [], True),
        ("smooth + gptq", "gptq", ["smooth"], True),
        ("awq + gptq", "gptq", ["awq"], True),
        ("rotate + nearest", "nearest", ["rotate"], True),
        ("rotate + gptq", "gptq", ["rotate"], True),
        ("rotate + gptq, half error-aware", {"method": "gptq", "error_aware": 0.5}, ["rotate"], True),
        ("signround", signround, [], True),
    ]
    for model in (SMELT, OUTLIERS):
        for label, rounding, transforms, reads in four:
            settings = {"scheme": "W4A4", "group_size": 128, "rounding": rounding, "transforms": transforms}
            yield ComparedMethod("four-bit-inputs", model, label, settings, reads)
    # Nothing but an operation at run time can rotate what down_proj reads; with 8 bits there, the rest shows.
    wider = [{"targets": ["re:.*down_proj"], "scheme": "W4A8"}]
    for label, rounding, transforms, reads in four[1:-1]:
        settings = {"scheme": "W4A4", "group_size": 128, "rounding": rounding, "transforms": transforms}
        label = f"{label}, down_proj W4A8"
        yield ComparedMethod("four-bit-inputs", SMELT, label, settings | {"overrides": wider}, reads)
    learned = [{"method": "rotate", "learn": 100}]
    options: dict[str, dict[str, Any]] = {
        "gptq, no sweeps": {"sweeps": 0},
        "gptq, eight sweeps": {"sweeps": 8},
        "gptq, refitted groups": {"refit_groups": True},
        "gptq, half error-aware, refitted groups": {"error_aware": 0.5, "refit_groups": True},
        "gptq, columns in order": {"activation_order": False},
    }
    for scheme, group in (("W2A16", 64), ("W3A16", 128), ("W4A4", 128)):
        for label, chosen in options.items():
            settings = {"scheme": scheme, "group_size": group, "rounding": {"method": "gptq", **chosen}}
            yield ComparedMethod("gptq-options", SMELT, label, settings)
    for label, chosen in (("gptq", {}), ("gptq, half error-aware", {"error_aware": 0.5})):
        settings = {
            "scheme": "W4A4",
            "group_size": 128,
            "rounding": {"method": "gptq", **chosen},
            "transforms": learned,
        }
        yield ComparedMethod("gptq-options", SMELT, f"learned rotate + {label}", settings)
    halves = {"scheme": "W4A4", "group_size": 128, "rounding": {"method": "gptq", "error_aware": 0.5}}
    yield ComparedMethod("gptq-options", SMELT, "gptq, half error-aware", halves)
    for model in (SMELT, OUTLIERS):
        for label, transforms in (("nearest", []), ("smooth + nearest", ["smooth"]), ("rotate + nearest", ["rotate"])):
            settings = {"scheme": "W8A8", "inputs": "static", "rounding": "nearest", "transforms": transforms}
            yield ComparedMethod("outliers", model, label, settings)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--part", choices=["few-bits", "four-bit-inputs", "gptq-options", "outliers"])
    asked = options.parse_args().part
    rows = ResultRows("orderings", "python -m benchmarks.quantization.orderings")
    with tempfile.TemporaryDirectory() as scratch:
        bench = _Bench(Path(scratch))
        for cell in cells():
            if asked in (None, cell.part) and not rows.has(model=cell.model, format=cell.format, method=cell.label):
                rows.add(bench.measure(cell))


class _Bench:
    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        stories = json.loads((shared("data/text/tinystories_1000.json")).read_text())
        held_out = scratch / "stories.txt"
        held_out.write_text(
            "\n\n".join(s if isinstance(s, str) else s.get("story", s.get("text")) for s in stories[900:])
        )
        wiki, c4 = shared(WIKITEXT_TEST), shared(C4)
        twin = with_outliers(SMELT_6M, scratch / "twin")
        self._models = {
            SMELT: ("builtin:smelt-6m", c4, wiki),
            OUTLIERS: (str(twin), c4, wiki),
            STORIES: (
                str(shared("models/stories260K")),
                shared("data/text/tinystories_sample_exllamav2.txt"),
                held_out,
            ),
        }

    def measure(self, cell: ComparedMethod) -> dict[str, Any]:
        """One row of the result."""
        model, calibration, text = self._models[cell.model]
        found, seconds = [], []
        for seed in SEEDS if cell.reads_text else SEEDS[:1]:
            recipe = Recipe.model_validate(
                {
                    "model": model,
                    "output": str(self._scratch / "out"),
                    "seed": seed,
                    "calibrate": {"source": str(calibration), "samples": 128, "length": 256},
                    "steps": [{"quantize": cell.settings}],
                    "evaluate": {"text": str(text), "windows": 128, "length": 256, "samples": 0, "speed": False},
                }
            )
            began = time.perf_counter()
            found.append(run(recipe, fresh=True, progress=False).report.as_data()["models"])
            seconds.append(time.perf_counter() - began)
        perplexities = [compressed["text"]["perplexity"] for _, compressed in found]
        divergences = [compressed["against"]["kl"] for _, compressed in found]
        row = {
            "part": cell.part,
            "model": cell.model,
            "format": cell.format,
            "method": cell.label,
            "perplexity_original": round(found[0][0]["text"]["perplexity"], 3),
            "perplexity_mean": round(statistics.mean(perplexities), 3),
            "perplexity_spread": round(max(perplexities) - min(perplexities), 3),
            "perplexity": [round(p, 3) for p in perplexities],
            "kl_mean": round(statistics.mean(divergences), 5),
            "kl": [round(kl, 5) for kl in divergences],
        }
        print(*cell.key, row["perplexity_original"], row["perplexity"], row["kl"], f"{max(seconds):.0f} s", flush=True)
        return row


def with_outliers(source: Path, target: Path) -> Path:
    """A twin of a Llama that computes the same, in which some channels of each norm's output are larger by :data:`FACTOR`."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    with safe_open(source / "model.safetensors", "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no dict
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::EVERY] *= FACTOR
        elif name.endswith(tuple(f"{reader}_proj.weight" for reader in ("q", "k", "v", "gate", "up"))):
            tensor[:, ::EVERY] /= FACTOR
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


if __name__ == "__main__":
    main()

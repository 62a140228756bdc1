"""The model card: a checkpoint's ``README.md`` for the Hugging Face hub, made from the report's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.layer_sizes import LAYER_SIZES
from ...quant.stored.config import StoredSchemes
from ...system.storage.files import write_text
from ..loaders.rules import VLLM
from ..results.report import ReportData
from ..results.result import ModelResult
from ..results.tasks import primary_tasks
from ..results.wording import bytes_, interval, noise, number, percent_change, perplexity, speedup
from .markdown import plain, table


def write_card(report: ReportData, checkpoint: Path, original: ModelDirectory) -> None:
    """Write a checkpoint's model card.

    Args:
        report: with the original as its baseline and the checkpoint as the only other.
        checkpoint: a finished checkpoint.
        original: the model it was made of; its card's licence and language are taken over.
    """
    write_text(checkpoint / "README.md", card(report, checkpoint, original))


def card(report: ReportData, checkpoint: Path, original: ModelDirectory) -> str:
    """The card's text, without links or paths of this machine."""
    (model,) = report.candidates
    baseline = report.baseline
    base = base_name(original)
    title = f"{base.removeprefix('builtin:').rpartition('/')[2]}, {model.name}"
    front = yaml.safe_dump(_metadata(checkpoint, model, original), sort_keys=False, allow_unicode=True).strip()
    out = ["---", front, "---", "", f"# {plain(title)}", ""]
    out += [
        f"Compressed from {plain(base)} by Smelt {plain(report.versions.get('smelt', ''))}.",
        "",
    ]
    if model.text or model.tasks or model.speed:
        out += [f"**{plain(report.verdict)}**", ""]
    out += ["## Measured", "", *_table(model, baseline)]
    out += [
        *_conditions(report, model),
        *_use(checkpoint, model),
        "## Recipe",
        "",
        "```json",
        json.dumps(portable(model.recipe), indent=2),
        "```",
        "",
    ]
    return "\n".join(out)


def _metadata(checkpoint: Path, model: ModelResult, original: ModelDirectory) -> dict[str, Any]:
    is_quantized = _quantization(checkpoint) is not None
    found = taken_over(checkpoint, original) | {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if is_quantized and found.get("base_model") == original.name:  # the hub has no word for pruning
        found |= {"base_model_relation": "quantized"}
    found["tags"] = ["smelt", *(["compressed-tensors"] if is_quantized else []), model.scheme]
    results = _results(model)
    if results:
        found["model-index"] = [{"name": model.name, "results": results}]
    return found


def taken_over(checkpoint: Path, original: ModelDirectory) -> dict[str, Any]:
    """Licence, language and base model, from the card of the model that a checkpoint was made of."""
    earlier = _front_matter(original.path / "README.md")
    found: dict[str, Any] = {
        key: earlier[key] for key in ("license", "license_name", "license_link", "language") if key in earlier
    }
    if "license_link" in found:
        found |= _licence(found.pop("license_link"), checkpoint)
    # The hub links this value, so it must be a name on the hub, never a local path.
    if not original.name.startswith("builtin:") and original.name.count("/") == 1 and not Path(original.name).exists():
        found |= {"base_model": original.name}
    elif "base_model" in earlier:
        found |= {"base_model": earlier["base_model"]}
    return found


def base_name(original: ModelDirectory) -> str:
    """What a card calls the model that a checkpoint was made of, without paths of this machine."""
    return original.path.name if _is_path(original.name) else original.name


def _licence(link: Any, checkpoint: Path) -> dict[str, Any]:
    """The link to the licence: the copy in the checkpoint, or else the one in the original's card."""
    copied = next((name for name in ("LICENSE", "LICENSE.txt") if (checkpoint / name).is_file()), None)
    if copied is not None:
        return {"license_link": copied}
    return {"license_link": link} if str(link).startswith("https://") else {}


def _results(model: ModelResult) -> list[dict[str, Any]]:
    """By the hub's schema of evaluation results."""
    found = []
    if model.text is not None:
        found.append(_result(model.text.source, "perplexity", "Perplexity", model.text.perplexity))
    for task, _ in primary_tasks(model):
        found.append(_result(task.task, task.metric, task.metric, task.value))
    return found


def _result(dataset: str, kind: str, name: str, value: float) -> dict[str, Any]:
    return {
        "task": {"type": "text-generation"},
        "dataset": {"name": Path(dataset).name, "type": Path(dataset).stem},
        "metrics": [{"type": kind, "name": name, "value": round(value, 4)}],
    }


def _table(model: ModelResult, baseline: ModelResult | None) -> list[str]:
    against = model.against
    assert model.size is not None, "a card is of a checkpoint"
    theirs = baseline.size if baseline else None
    rows = [
        ["size", bytes_(theirs.bytes) if theirs else "", bytes_(model.size.bytes), ""],
        [
            "bits per weight",
            f"{theirs.bits_per_weight:.2f}" if theirs else "",
            f"{model.size.bits_per_weight:.2f}",
            "",
        ],
    ]
    if model.text is not None:
        change = against.perplexity if against else None
        rows.append(
            [
                "perplexity",
                perplexity(baseline.text.perplexity) if baseline and baseline.text else "",
                perplexity(model.text.perplexity),
                ""
                if change is None
                else _joined(percent_change(change.ratio), interval(change.interval, percent_change), noise(change)),
            ]
        )
    if against is not None and against.kl is not None:
        rows.append(["KL divergence from the original, nats", "", number(against.kl), ""])
    theirs = {(t.task, t.metric, t.filter): t for t in (baseline.tasks if baseline else [])}
    for task, change in primary_tasks(model):
        other = theirs.get((task.task, task.metric, task.filter))
        rows.append(
            [
                f"{task.task}, {task.metric}",
                f"{other.value:.4f}" if other else "",
                f"{task.value:.4f}",
                "" if change is None else _joined(f"{change.difference:+.4f}", noise(change)),
            ]
        )
    if model.speed is not None:
        for name, field in (("decode, tokens/s", "decode"), ("prompts, tokens/s", "prefill")):
            mine = getattr(model.speed, f"{field}_rate")
            other = getattr(baseline.speed, f"{field}_rate") if baseline and baseline.speed else None
            change = getattr(against, field) if against else None
            rows.append(
                [
                    name,
                    number(other.median) if other else "",
                    number(mine.median),
                    "" if change is None else _joined(speedup(change.ratio), noise(change)),
                ]
            )
    return table(["", "original", "this", "change"], rows)


def _conditions(report: ReportData, model: ModelResult) -> list[str]:
    lines = []
    if model.text is not None:
        source = model.text.source if "/" not in model.text.source else Path(model.text.source).name
        lines.append(
            f"Text: {model.text.windows} x {model.text.length} tokens of {plain(source)}, read by {plain(model.text.computed_by)}."
        )
    if model.speed is not None:
        lines.append(
            f"Speed: {model.speed.prompt} tokens in, {model.speed.generate} out, one request alone, on Smelt's runtime,"
            f" {report.machine.cores} cores of {plain(report.machine.processor)}."
        )
    if report.status == "partial":
        lines.append(f"Not measured: {plain(', '.join(report.missing))}.")
    return [*lines, ""] if lines else []


def _use(checkpoint: Path, model: ModelResult) -> list[str]:
    return [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer"
        f"{'' if _quantization(checkpoint) is None else '  # needs compressed-tensors'}",
        *_loading(checkpoint),
        'tokenizer = AutoTokenizer.from_pretrained("PATH")',
        "```",
        "",
        "```sh",
        *_serving(model),
        "smelt chat PATH",
        "smelt verify PATH      # measures again what is said here",
        "```",
        "",
        "```python",
        "from smelt.runtime import Engine, SamplingParams",
        "",
        'print(Engine("PATH").generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)',
        "```",
        "",
    ]


def _serving(model: ModelResult) -> list[str]:
    """The vLLM command if vLLM loads it; otherwise why it does not."""
    vllm = next((loader for loader in model.loaders if loader.name == VLLM), None)
    if vllm is None:
        return []
    return [f"vllm serve PATH      # {vllm.sentence}" if vllm.loads else f"# {vllm.sentence}"]


def _quantization(checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's ``quantization_config``; None if it was only pruned."""
    return _config(checkpoint).get("quantization_config")


def _config(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))


def _loading(checkpoint: Path) -> list[str]:
    quantization, needs = _quantization(checkpoint), "nothing"
    if LAYER_SIZES in _config(checkpoint):
        needs = "plug-in"
    elif quantization is not None:
        schemes = StoredSchemes(quantization)
        kept = schemes.keys_values
        # transformers alone would not round keys and values.
        rounds = kept is not None and kept.dynamic is True
        needs = "plug-in" if rounds else schemes.needs(CheckpointWeights(checkpoint).names())
    return {
        "nothing": ["", 'model = AutoModelForCausalLM.from_pretrained("PATH")'],
        "plug-in": [
            "from smelt.compress import config_for",
            "",
            'model = AutoModelForCausalLM.from_pretrained("PATH", config=config_for("PATH"))',
        ],
        "dequantizing": [
            "from transformers import CompressedTensorsConfig",
            "",
            "plain = CompressedTensorsConfig(dequantize=True)",
            'model = AutoModelForCausalLM.from_pretrained("PATH", quantization_config=plain)',
        ],
    }[needs]


def portable(data: Any) -> Any:
    """Plain data with local paths reduced to their names."""
    if isinstance(data, dict):
        return {key: portable(value) for key, value in data.items()}
    if isinstance(data, list):
        return [portable(value) for value in data]
    return Path(data).name if isinstance(data, str) and _is_path(data) else data


def _is_path(text: str) -> bool:
    try:
        return text.startswith(("/", "~", "./", "../")) or Path(text).exists()
    except OSError:  # longer than any name, so none
        return False


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _front_matter(path: Path) -> dict[str, Any]:
    """The YAML front matter of a card; empty if missing or unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    if not text.startswith("---\n"):
        return {}
    try:
        found = yaml.safe_load(text[4:].partition("\n---")[0])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    # Untrusted input: only fields that are a name or a list of names are copied.
    return {key: value for key, value in found.items() if _is_names(value)} if isinstance(found, dict) else {}


def _is_names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))

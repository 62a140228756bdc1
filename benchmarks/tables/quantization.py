"""Tables of rounding, transforms and mixed precision."""

from __future__ import annotations

import re
import statistics
from typing import Any

from .table import ResultsTable, each, grouped, markdown, spread

_TOOLS = {"smelt": "Smelt", "llm-compressor": "llm-compressor", "gptqmodel": "GPTQModel", "auto-round": "AutoRound"}
_FORMATS = ((3, 128), (2, 64))
# What each tool calls a method, and what everyone would call it.
_METHODS = {
    "rtn": "nearest",
    "rtn disable_opt_rtn=true": "nearest, scales not searched",
    "signround enable_alg_ext=true": "signround, extensions",
    "gptq memoryless_mse": "gptq, scales searched",
    "quip+gptq memoryless_mse": "quip + gptq, scales searched",
    "gptq mse=2.4": "gptq, scales searched",
    "gptaq mse=2.4": "gptaq, scales searched",
    "gptq, scales not searched": "gptq, scales not searched",
    "gptq, half error-aware": "gptq, `error_aware: 0.5`",
}
_ALIKE = (
    ("nearest", ("nearest", "rtn", "rtn disable_opt_rtn=true")),
    ("nearest with searched scales", ("nearest, scales searched", "clip + nearest", "hqq")),
    ("awq", ("awq + nearest", "awq+rtn", "awq + gptq", "awq+gptq")),
    (
        "gptq",
        (
            "gptq",
            "gptq, scales not searched",
            "gptq memoryless_mse",
            "gptq mse=2.4",
            "gptq, half error-aware",
            "gptq-plain",
            "gptq-desc-act",
            "gptaq",
            "gptaq mse=2.4",
            "foem",
        ),
    ),
    ("rotations", ("rotate + gptq", "spinquant+gptq", "quip+gptq", "quip+gptq memoryless_mse")),
    ("signround", ("signround", "signround enable_alg_ext=true")),
)
# What each tool does best at each price: without gradients and without Hessians, with Hessians, with gradients.
_SHORT = (
    ("smelt", "clip + nearest"),
    ("llm-compressor", "awq+rtn"),
    ("auto-round", "rtn"),
    ("smelt", "gptq, half error-aware"),
    ("llm-compressor", "gptq memoryless_mse"),
    ("llm-compressor", "quip+gptq memoryless_mse"),
    ("gptqmodel", "gptaq mse=2.4"),
    ("smelt", "signround"),
    ("auto-round", "signround"),
    ("auto-round", "signround enable_alg_ext=true"),
)


def peers(results: Any) -> str:
    """Perplexity and divergence of everyone's quantizers, on the same windows."""
    named = [(tool, name) for _, names in _ALIKE for name in names for tool in _TOOLS]
    return _peers(results, named)


def peers_short(results: Any) -> str:
    """The same for the methods that matter most."""
    return _peers(results, _SHORT)


def _peers(results: Any, named: Any) -> str:
    found = grouped(results["quality"], "tool", "method", "bits", "group_size")
    rows = []
    for tool, method in named:
        cells = []
        for bits, group in _FORMATS:
            runs = found.get((tool, method, bits, group))
            cells.append(f"{spread(each(runs, 'perplexity'), 1)}, {_mean(runs, 'kl', 4)}" if runs else "")
        if any(cells):
            rows.append((f"{_TOOLS[tool]}: {_METHODS.get(method) or _spaced(method)}", *cells))
    return markdown(("", *(f"W{bits} g{group}" for bits, group in _FORMATS)), rows)


def _spaced(method: str) -> str:
    return re.sub(r" *\+ *", " + ", method).replace("rtn", "nearest")


def cost(results: Any) -> str:
    """Time and memory of quantizing, beside others."""
    rows = []
    for run in (*results["cost"], *results["without_text"]):
        seconds, memory = _time_and_memory(run)
        above = [_of(run, tool, "above_imports_mb_median", "{:.0f} MB") for tool in _TOOLS]
        rows += [(f"{_what(run)}: time", *seconds), ("peak memory", *memory), ("of it above imports", *above)]
    return markdown(("", *_TOOLS.values()), rows)


def cost_short(results: Any) -> str:
    """The same for the largest model of each method, in one row each."""
    largest = {run.get("method", "").partition(",")[0]: run for run in results["cost"] if "587 MB" in run["model"]}
    rows = []
    for run in (*largest.values(), *results["without_text"]):
        cells = zip(*_time_and_memory(run), strict=True)
        rows.append((_what(run), *(", ".join(filter(None, both)) for both in cells)))
    return markdown(("", *_TOOLS.values()), rows)


def _what(run: dict[str, Any]) -> str:
    return f"{run['model']}, {run.get('method') or run['scheme'] + ', nearest, no text'}"


def _time_and_memory(run: dict[str, Any]) -> tuple[list[str], list[str]]:
    seconds = [_of(run, tool, "seconds_median", "{:.1f} s") for tool in _TOOLS]
    return seconds, [_of(run, tool, "peak_mb_median", "{:.0f} MB") for tool in _TOOLS]


def _of(run: dict[str, Any], tool: str, key: str, form: str) -> str:
    return form.format(run[tool][key]) if tool in run else ""


def _mean(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    return f"{statistics.mean(each(runs, key)):.{digits}f}"


_ROUNDINGS = (
    "nearest",
    "nearest, scales searched",
    "hqq",
    "clip + nearest",
    "awq + nearest",
    "gptq, plain scales",
    "gptq",
    "rotate + gptq",
    "awq + gptq",
    "gptq, half error-aware",
    "signround",
)
_SETTINGS = {
    "nearest, scales searched": "nearest, `scale_search: true`",
    "gptq, plain scales": "gptq, `scale_search: false`",
    "gptq, half error-aware": "gptq, `error_aware: 0.5`",
    "rotate + gptq, half error-aware": "rotate + gptq, `error_aware: 0.5`",
    "signround": "signround, 200 iterations",
}
_OUTLIERS = "smelt-6m with outliers"


def few_bits(results: Any) -> str:
    """Weights alone, on smelt-6m."""
    formats = ("W4A16 g128", "W3A16 g64", "W3A16 g128", "W2A16 g64", "W2A16 g128")
    return _orderings(results, [("few-bits", "smelt-6m", name, "", name.replace("A16", "")) for name in formats])


def stories(results: Any) -> str:
    """Weights alone, a scale a channel, on stories260K."""
    formats = ("W4A16 g-1", "W3A16 g-1", "W2A16 g-1")
    return _orderings(results, [("few-bits", "stories260K", name, "", name[:2]) for name in formats])


def four_bit_inputs(results: Any) -> str:
    """W4A4, with outliers and without."""
    part, name = "four-bit-inputs", "W4A4 g128"
    columns = [
        (part, "smelt-6m", name, "", "smelt-6m"),
        (part, "smelt-6m", name, ", down_proj W4A8", "the same, `down_proj` at W4A8"),
        (part, _OUTLIERS, name, "", "its twin with outliers"),
    ]
    methods = (
        "nearest",
        "gptq",
        "smooth + gptq",
        "awq + gptq",
        "rotate + nearest",
        "rotate + gptq",
        "rotate + gptq, half error-aware",
        "signround",
    )
    return _orderings(results, columns, methods)


def static_inputs(results: Any) -> str:
    """W8A8 with scales that are fixed beforehand, with outliers and without."""
    columns = [
        ("outliers", "smelt-6m", "W8A8", "", "smelt-6m"),
        ("outliers", _OUTLIERS, "W8A8", "", "its twin with outliers"),
    ]
    return _orderings(results, columns, ("nearest", "smooth + nearest", "rotate + nearest"))


def _orderings(results: Any, columns: list[tuple[str, ...]], methods: tuple[str, ...] = _ROUNDINGS) -> str:
    known = {(row["part"], row["model"], row["format"], row["method"]): row for row in results}
    rows = []
    for method in methods:
        found = [known.get((part, model, name, method + suffix)) for part, model, name, suffix, _ in columns]
        if any(found):
            rows.append((_SETTINGS.get(method, method), *(_ordering(one) for one in found)))
    return markdown(("", *(column[-1] for column in columns)), rows)


def _ordering(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    mean = row["perplexity_mean"]
    shown = f"{mean:.1f}" if mean < 1e5 else f"{mean:.1e}"
    width = f" ({row['perplexity_spread']:.1f})" if row["perplexity_spread"] and mean < 1e5 else ""
    return f"{shown}{width}, {row['kl_mean']:.4f}"


_OPTIONS = {
    "gptq": "gptq",
    "`sweeps: 0`": "gptq, no sweeps",
    "`sweeps: 8`": "gptq, eight sweeps",
    "`error_aware: 0.5`": "gptq, half error-aware",
    "`refit_groups: true`": "gptq, refitted groups",
    "`error_aware: 0.5`, `refit_groups: true`": "gptq, half error-aware, refitted groups",
    "`activation_order: false`": "gptq, columns in order",
}


def gptq_options(results: Any) -> str:
    """GPTQ with its options, by format."""
    known = _on_smelt(results)
    formats = ("W2A16 g64", "W3A16 g128", "W4A4 g128")
    rows = [
        (label, *(_spread(known.get((name, method)), "kl", 4) for name in formats))
        for label, method in _OPTIONS.items()
    ]
    return markdown(("", *formats), rows)


def learned_rotations(results: Any) -> str:
    """Random rotations beside learned ones."""
    known = _on_smelt(results)
    rows = []
    for label, method in (("gptq", "gptq"), ("gptq, `error_aware: 0.5`", "gptq, half error-aware")):
        runs = [known.get(("W4A4 g128", f"{way} + {method}")) for way in ("rotate", "learned rotate")]
        rows.append(
            (label, *(_spread(run, key, digits) for key, digits in (("kl", 4), ("perplexity", 1)) for run in runs))
        )
    return markdown(("rounding", "KL, random", "KL, learned", "perplexity, random", "perplexity, learned"), rows)


def _on_smelt(results: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["format"], row["method"]): row for row in results if row["model"] == "smelt-6m"}


def _spread(row: dict[str, Any] | None, key: str, digits: int) -> str:
    return "not measured" if row is None else spread(row[key], digits)


def mixed(results: Any) -> str:
    """Formats chosen part by part beside one everywhere."""
    rows = []
    for scheme in dict.fromkeys(row["uniform"]["scheme"] for row in results["quality"]):
        runs = [row for row in results["quality"] if row["uniform"]["scheme"] == scheme]
        ways = {
            "uniform": f"{scheme} g64 everywhere",
            "auto": "auto, usual candidates, g64",
            "auto, several group sizes": "auto, groups of 32, 64 and 128",
        }
        for way, label in ways.items():
            chosen = [run[way] for run in runs]
            numbers = [
                ", ".join(f"{one[key]:.{digits}f}" for one in chosen) if key in chosen[0] else ""
                for key, digits in (("kl", 4), ("perplexity", 2), ("predicted_kl", 4))
            ]
            rows.append((f"{chosen[0]['bits_per_weight']:.2f}", label, *numbers))
    return markdown(("bits", "", "KL by seed", "perplexity by seed", "predicted KL"), rows, left=2)


def mixed_speed(results: Any) -> str:
    """Targets of speed, predicted and measured."""
    rows = [
        (
            f"{row['target']:.1f}",
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"{min(row['measured_each']):.2f} to {max(row['measured_each']):.2f}",
        )
        for row in results["speed"]
    ]
    return markdown(("target", "predicted", "measured", "range of the turns"), rows, left=0)


def adapters(results: Any) -> str:
    """A LoRA adapter on a compressed checkpoint, before and after merging."""
    chosen = sorted(results, key=lambda row: row["scheme"], reverse=True)
    labels = {
        "original": "before compression",
        "compressed": "compressed",
        "with_adapter": "with its adapter",
        "merged_nearest": "merged, nearest (`smelt merge`)",
        "merged_gptq": "merged, GPTQ on the builtin text",
        "merged_gptq_on_plays": "merged, GPTQ on the training text",
    }
    rows = [(label, *(f"{row['perplexity'][key]:.1f}" for row in chosen)) for key, label in labels.items()]
    rows.append(("share of the change that survives nearest", *(f"{row['survived_nearest']:.0%}" for row in chosen)))
    return markdown(("perplexity", *(f"{row['scheme']} g{row['group_size']}" for row in chosen)), rows)


def format_losses(results: Any) -> str:
    """What each choice of `smelt plan` loses, the least first."""
    schemes = [name for name in results if f"{name}, head too" in results]
    rows = [(name, f"{results[name]:.4f}", f"{results[f'{name}, head too']:.4f}") for name in schemes]
    others = [name for name in results if name.endswith(("cache", "dropped"))]
    rows += [(name, f"{results[name]:.4f}", "") for name in others]
    return markdown(("choice", "KL, linears", "KL, head too"), rows)


TABLES = {
    "format losses": ResultsTable("format_losses", format_losses),
    "peers": ResultsTable("against_peers", peers),
    "peers short": ResultsTable("against_peers", peers_short),
    "cost": ResultsTable("against_peers", cost),
    "cost short": ResultsTable("against_peers", cost_short),
    "few bits": ResultsTable("orderings", few_bits),
    "stories": ResultsTable("orderings", stories),
    "four-bit inputs": ResultsTable("orderings", four_bit_inputs),
    "static inputs": ResultsTable("orderings", static_inputs),
    "gptq options": ResultsTable("orderings", gptq_options),
    "learned rotations": ResultsTable("orderings", learned_rotations),
    "mixed precision": ResultsTable("mixed_precision", mixed),
    "mixed precision speed": ResultsTable("mixed_precision", mixed_speed),
    "adapters": ResultsTable("adapters", adapters),
}

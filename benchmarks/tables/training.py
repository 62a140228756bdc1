"""Tables of distillation and quantization-aware training."""

from __future__ import annotations

import statistics
from typing import Any

from .table import ResultsTable, each, grouped, markdown, spread

_NOUNS = "shared_blimp_determiner_noun_agreement_1"
_GAP = "shared_blimp_wh_questions_object_gap"
_LABELS = {
    "half of the parameters pruned": "pruned",
    "pruned, trained on the text": "pruned, trained on the text alone",
    "from scratch, on the text": "the same shape from scratch, on the text",
    "from scratch, distilled": "the same shape from scratch, distilled",
    "not trained on": "nothing more",
}


def distilled(results: Any) -> str:
    """Half a model, trained back."""
    return _trained(results, quantized=False)


def quantized(results: Any) -> str:
    """Few bits, rounded and trained."""
    return _trained(results, quantized=True)


def _trained(results: Any, *, quantized: bool) -> str:
    first = results[0]
    original = first["tasks_original"]
    rows = [
        ("the original", f"{first['perplexity_original']:.1f}", "", f"{original[_NOUNS]:.2f}, {original[_GAP]:.2f}")
    ]
    for (method,), runs in grouped(results, "method").items():
        if method.startswith("W") != quantized:
            continue
        blimp = ", ".join(f"{statistics.mean(run['tasks'][name] for run in runs):.2f}" for name in (_NOUNS, _GAP))
        kl = spread(each(runs, "kl"), 4 if quantized else 3)
        rows.append((_LABELS.get(method) or method, spread(each(runs, "perplexity"), 1), kl, blimp))
    return markdown(("", "perplexity", "KL", "BLiMP: agreement, gap"), rows)


def texts(results: Any) -> str:
    """The pruned and trained models, judged by other texts."""
    names = list(results[0]["perplexity"])
    rows = []
    for (method,), runs in grouped(results, "method").items():
        values = [[run["perplexity"][name] for run in runs] for name in names]
        rows.append((_LABELS.get(method, method), *(spread(value, 1) for value in values)))
    return markdown(("perplexity", *(f"`{name}`" if "<" in name else name for name in names)), rows)


def blimp(results: Any) -> str:
    """BLiMP's phenomena, one by one."""
    original = results[0]["accuracies"]
    rows = [("the original", "", f"{results[0]['mean']:.4f}", "")]
    for (method,), runs in grouped(results[1:], "method").items():
        apart = statistics.mean(
            abs(statistics.mean(run["accuracies"][name] for run in runs) - accuracy)
            for name, accuracy in original.items()
        )
        by_seed = ", ".join(f"{run['mean']:.4f}" for run in runs)
        rows.append((method, by_seed, f"{statistics.mean(each(runs, 'mean')):.4f}", f"{apart:.4f}"))
    return markdown(("accuracy", "by seed", "mean", "mean distance from the original, by phenomenon"), rows)


def on_policy(results: Any) -> str:
    """Whose text to learn from."""
    rows = []
    for (name,), runs in grouped(results, "trained on").items():
        exactly = ", ".join(f"{statistics.mean(each(runs, f'exactly {n}')):.2f}" for n in (4, 8))
        likely = spread(each(runs, "likelihood"), 2)
        rows.append((_LABELS.get(name, name), spread(each(runs, "kl"), 3), likely, exactly))
    rows.append(rows.pop(0))  # the teacher itself last
    return markdown(("trained on", "KL on the text", "the teacher's log-likelihood", "exactly 4, 8"), rows)


def speed(results: Any) -> str:
    """Tokens a second beside a bare training loop."""
    labels = {"text": "the text", "teacher": "a teacher that reads along", "stored": "a stored teacher"}
    known = {row["learns from"]: row for row in results}
    rows = [
        (
            label,
            f"{known[name]['smelt, tokens/s']:,}",
            f"{known[name]['smelt over bare, bfloat16']:.2f}",
            f"{known[name]['smelt over bare, autocast']:.2f}",
        )
        for name, label in labels.items()
    ]
    return markdown(("learns from", "tokens/s", "times the bare loop", "times the bare loop with autocast"), rows)


TABLES = {
    "distilled": ResultsTable("training", distilled),
    "trained at few bits": ResultsTable("training", quantized),
    "distilled, by text": ResultsTable("training_texts", texts),
    "blimp": ResultsTable("blimp", blimp),
    "on policy": ResultsTable("on_policy", on_policy),
    "training speed": ResultsTable("training_speed", speed),
}

"""Tables of pruning."""

from __future__ import annotations

from typing import Any

from .table import ResultsTable, grouped, markdown, spread

_GAP = "shared_blimp_wh_questions_object_gap"


def weights(results: Any) -> str:
    """Single weights, by share and pattern."""
    methods = ("magnitude", "wanda", "wanda + sparsegpt's update", "sparsegpt")
    columns = ("50%", "2:4", "4:8", "70%")
    return _grid(results, columns, [(name, [f"{column} {name}" for column in columns]) for name in methods])


def allocation(results: Any) -> str:
    """The same with the sparsity shared out over linears."""
    columns = [(share, name) for share in ("50%", "70%") for name in ("wanda", "sparsegpt")]
    ways = {"uniform": "", "owl": ", owl", "sensitivity": ", sensitivity"}
    rows = [(way, [f"{share} {name}{suffix}" for share, name in columns]) for way, suffix in ways.items()]
    return _grid(results, [f"{name}, {share}" for share, name in columns], rows)


def channels(results: Any) -> str:
    """Feed-forward channels, by score."""
    scores = ("weight", "path", "activation", "wanda", "taylor")
    columns = ("25%", "25%, least squares", "50%", "50%, least squares")
    rows = [(score, _units("ffn", score, columns)) for score in scores]
    rows.append(("wanda, shared out by sensitivity", _units("ffn", "wanda", columns, ", shared out")))
    return _grid(results, columns, rows)


def heads(results: Any) -> str:
    """Attention heads, by score."""
    scores = ("weight", "path", "activation", "wanda", "taylor")
    columns = ("50%", "50%, least squares")
    rows = [(score, _units("heads", score, columns)) for score in scores]
    rows.append(("wanda, shared out by sensitivity", _units("heads", "wanda", columns, ", shared out")))
    return _grid(results, columns, rows)


def _units(what: str, score: str, columns: tuple[str, ...], suffix: str = "") -> list[str]:
    found = []
    for column in columns:
        share, _, update = column.partition(", ")
        found.append(f"{share} of {what}, {score}{', ' + update if update else ''}{suffix}")
    return found


def hidden(results: Any) -> str:
    """The hidden width, by score."""
    scores = ("weight", "activation", "taylor", "pca")
    columns = ("25%", "50%")
    return _grid(results, columns, [(one, [f"{share} of hidden, {one}" for share in columns]) for one in scores])


def blocks(results: Any) -> str:
    """Whole blocks, and their parts."""
    columns = ("1 of 6 blocks", "2 of 6 blocks", "1 of 6 attention", "1 of 6 mlp")
    methods = ("influence", "influence, merged", "loss", "loss, merged")
    return _grid(results, columns, [(name, [f"{column}, {name}" for column in columns]) for name in methods])


def _grid(results: Any, columns: Any, rows: Any) -> str:
    known = {row["method"]: row for row in results}
    lines = [(name, *(_cost(known.get(method)) for method in methods)) for name, methods in rows]
    return markdown(("", *columns), lines)


def _cost(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    digits = 0 if row["perplexity"][0] >= 500 else 1
    kept = spread([task[_GAP] for task in row["tasks"]], 2).partition(" ")[0]
    return f"{spread(row['perplexity'], digits)}, {sum(row['kl']) / len(row['kl']):.3f}, {kept}"


def texts(results: Any) -> str:
    """The same checkpoints, judged by six texts."""
    names = list(results[0]["perplexity"])
    rows = []
    for row in results:
        values = [row["perplexity"][name] for name in names]
        rows.append(
            (row["method"], *(spread(each_, 1) if isinstance(each_, list) else f"{each_:.1f}" for each_ in values))
        )
    return markdown(("", *(f"`{name}`" if "<" in name else name for name in names)), rows)


def peer(results: Any) -> str:
    """Beside Torch-Pruning."""
    columns = {
        ("ffn", 0.25): "ffn 25%",
        ("ffn", 0.5): "ffn 50%",
        ("hidden", 0.25): "hidden 25%",
        ("both", 0.25): "both 25%",
    }
    found = grouped([row for row in results if "pruned" in row], "method")
    rows = []
    for (method,), runs in found.items():
        known = {(run["pruned"], run["ratio"]): spread(run["perplexity"], 1) for run in runs}
        rows.append((method, *(known.get(column, "") for column in columns)))
    return markdown(("perplexity", *columns.values()), rows)


def speed(results: Any) -> str:
    """Operations removed, time removed, and the second over the first."""
    models = list(dict.fromkeys(row["model"] for row in results))
    found = {(row["model"], _removed(row)): row for row in results}
    rows = []
    for removed in dict.fromkeys(_removed(row) for row in results):
        cells = [_saved(found[model, removed][load]) for model in models for load in ("decode", "prompt")]
        rows.append((removed, *cells))
    return markdown(("removed", *(f"{model}, {load}" for model in models for load in ("token", "prompt"))), rows)


def _removed(row: dict[str, Any]) -> str:
    return " + ".join(f"{share:.0%} of {what}" for what, share in row["removed"].items())


def _saved(load: dict[str, Any]) -> str:
    return f"{load['operations_removed']:.0%}, {load['time_removed']:.0%} ({load['ratio']:.2f})"


TABLES = {
    "pruned weights": ResultsTable("pruning", weights),
    "pruned weights, shared out": ResultsTable("pruning", allocation),
    "pruned channels": ResultsTable("pruning", channels),
    "pruned heads": ResultsTable("pruning", heads),
    "pruned hidden width": ResultsTable("pruning", hidden),
    "pruned blocks": ResultsTable("pruning", blocks),
    "pruning by text": ResultsTable("pruning_texts", texts),
    "pruning peer": ResultsTable("pruning_peer", peer),
    "pruning speed": ResultsTable("pruning_speed", speed),
}

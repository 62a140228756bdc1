"""Tables of speculative decoding."""

from __future__ import annotations

import statistics
from typing import Any

from .table import ResultsTable, markdown

_DRAFTED = (
    "model",
    "sequences",
    "accepted",
    "tokens/s alone",
    "with drafts",
    "ratio",
    "tokens per verification",
    "drafted",
    "same tokens",
)
_MANY = 20  # turns, of which the longest and the shortest say more of the machine


def _drafted_lines(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            row["pair"], str(row["sequences"]), _share(row["agreement"] if row["forced"] is None or "looked_up" in row else row["forced"]),
            f"{row['plain']:.1f}", f"{row['drafted']:.1f}",
            f"**{row['ratio']:.2f}** ({_spread(row['ratios'])})",
            "-" if row["per_verification"] is None else f"{row['per_verification']:.2f}", f"{row['drafts']:.1f}",
            "yes" if row["same_tokens"] else "no", *([f"{row['looked_up']:.0%}"] if _ranks_lookup(rows) else []),
        )
        for row in rows
    ]  # fmt: skip


def _ranks_lookup(rows: list[dict[str, Any]]) -> bool:
    """Whether some of what is drafted is looked up, and some is not."""
    return any(0 < row.get("looked_up", 0) < 1 for row in rows)


def _spread(ratios: list[float]) -> str:
    """From the lowest to the highest; of many, of their middle half."""
    if len(ratios) < _MANY:
        return f"{min(ratios):.2f} to {max(ratios):.2f}"
    first, _, third = statistics.quantiles(ratios, n=4)
    return f"{first:.2f} to {third:.2f}"


def _turns(results: Any, ratios: str) -> str:
    """How many there were of each model."""
    of_small = len(results["small"][0][ratios])
    found = f"Medians of {results['turns']} turns"
    if of_small == results["turns"]:
        return found
    return f"{found}, of smelt-6m's of {of_small}, whose middle half is in brackets instead of their range"


def speculation(results: Any) -> str:
    """Without drafts and with them."""
    lookup = _ranks_lookup(results["big"])
    head = (*_DRAFTED, *(("looked up",) if lookup else ()))
    where = (
        "; what is looked up is right where it is so in texts of smelt-6m, or (`copying`) in text that is repeated with one token in ten replaced"
        if lookup
        else ""
    )
    return (
        f"{_turns(results, 'ratios')}; ratios of neighbours in time. `accepted` is the share of draft tokens that are right where those before"
        f" them are{', `looked up` the share of draft tokens that are so' if lookup else ''}. smelt-6m on real text:\n\n"
        + markdown(head, _drafted_lines(results["small"]))
        + "\nA Llama of 1.1 billion random weights, whose drafts are made right as often as those of the same pair above"
        + f"{where}:\n\n"
        + markdown(head, _drafted_lines(results["big"]))
    )


def on_ranks(results: Any) -> str:
    """Without drafts and with them, on one process and on two."""
    head = ("model", "processes", "tokens/s alone", "with drafts", "ratio", "tokens per verification", "same tokens")
    lines = [
        (
            row["pair"], "one" if row["way"] == "alone" else f"`{row['way']}`", f"{row['plain']:.1f}", f"{row['drafted']:.1f}",
            f"**{row['ratio']:.2f}** ({_spread(row['ratios'])})", f"{row['per_verification']:.2f}", "yes" if row["same_tokens"] else "no",
        )
        for row in results["rows"]
    ]  # fmt: skip
    return (
        f"A Llama of 1.1 billion random weights, one sequence, drafts made right as often as those of smelt-6m; medians of {results['turns']}"
        " turns, ratios of neighbours in time.\n\n" + markdown(head, lines)
    )


def nested_bits(results: Any) -> str:
    """Losses of 8 bits and of their upper four."""

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        original, whole = row.get("beside_original", {}), row.get("upper_beside_whole", {})
        upper, elsewhere = row.get("upper_perplexity"), row.get("upper_beside_whole_elsewhere", {})
        return (
            row["form"], f"{row['perplexity']:.2f}", _share(original.get("top")), _share(original.get("overlap")),
            "-" if upper is None else f"{upper:.2f}", _share(whole.get("top")), _share(whole.get("overlap")),
            _share(elsewhere.get("top")), _share(elsewhere.get("overlap")),
        )  # fmt: skip

    head = (
        "form",
        "perplexity",
        "same top token as bfloat16",
        "overlap",
        "upper bits' perplexity",
        "same top token as all bits",
        "overlap",
        "TinyStories: same top token",
        "overlap",
    )
    said = (
        f"{results['windows']} windows of {results['length']} tokens. Trained forms learned from {results['trained_on']} tokens of"
        " WikiText-2's training text.\n\n"
    )
    return said + markdown(head, map(line, results["rows"]))


def upper_bits(results: Any) -> str:
    """Tokens a second of all bits and of the upper ones."""
    head = ("sequences", "tokens/s", "from the upper bits", "ratio")
    rows = [
        (
            str(row["sequences"]), f"{row['whole']:.1f}", f"{row['upper']:.1f}",
            f"**{statistics.median(row['ratios']):.2f}** ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
        )
        for row in results["rows"]
    ]  # fmt: skip
    return (
        f"A Llama of 1.1 billion random weights; medians of {results['turns']} turns, without drafts.\n\n"
        + markdown(head, rows)
    )


def drafters(results: Any) -> str:
    """How well drafters agree, by what they learned."""

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        return (
            row["learns"], _share(row["top"]), _share(row["overlap"]),
            *(cell for how in ("greedy", "sampled") for cell in (_share(row[how]["accepted"]), f"{row[how]['tokens']:.2f}")),
        )  # fmt: skip

    head = ("learned by", "same top token", "overlap", "accepted, greedy", "tokens", "accepted, sampled", "tokens")
    return (
        f"Drafters of {results['blocks']} blocks of smelt-6m after {results['tokens']} tokens, on {results['written']} tokens that the model writes after each of"
        f" {results['requests']} prompts; drafts of three tokens, and the tokens that a verification gives.\n\n"
        + markdown(head, map(line, results["rows"]))
    )


def heads(results: Any) -> str:
    """Draft heads, without drafts and with them."""
    held_out = results["held_out"]
    places = [held_out[f"accepted {i + 1}"] for i in range(len(held_out) // 2)]
    return (
        f"A head trained for smelt-6m on {results['tokens']} tokens that the model wrote; of such text that was held out exact verification would accept, by place"
        f" in a draft and if those before are right, {', '.join(map(_share, places))} of sampled tokens. {_turns(results, 'ratios')}. smelt-6m on the builtin evaluation text, which is like what it learned"
        " from:\n\n"
        + markdown(_DRAFTED, _drafted_lines(results["small"]))
        + "\nOf greedy drafts of three tokens are right, where those before them are, on that text and on WikiText-2, which is not:\n\n"
        + markdown(("model", "builtin", "WikiText-2"), _on_texts(results))
        + "\nA Llama of 1.1 billion random weights, whose drafts are made right as often as those of the same pair on the builtin text:\n\n"
        + markdown(_DRAFTED, _drafted_lines(results["big"]))
    )


def _on_texts(results: Any) -> list[tuple[str, ...]]:
    texts = results["acceptance"]
    return [(name, *(_share(shares[name]) for shares in texts.values())) for name in texts["builtin"]]


def token_trees(results: Any) -> str:
    """Chains and trees, beside no drafts and beside each other."""

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        return (
            row["pair"], str(row["sequences"]), f"{statistics.median(rates[0] for rates in row['rates']):.1f}",
            f"{row['chains']:.2f}", f"{row['trees']:.2f}",
            f"**{statistics.median(row['beside']):.2f}** ({_spread(row['beside'])})",
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in ("chain_tokens", "tree_tokens")),
            f"{row['branched']:.1f}", "yes" if row["same_tokens"] else "no",
        )  # fmt: skip

    head = (
        "model",
        "sequences",
        "tokens/s alone",
        "chains",
        "trees",
        "trees beside chains",
        "tokens per chain",
        "tokens per tree",
        "branched",
        "same tokens",
    )
    known = [(name, _share(each["share"]), _share(each["caught"])) for name, each in results["acceptance"].items()]
    return (
        f"{_turns(results, 'beside')}, in which no drafts, chains and trees of up to {results['branches']} branches follow each other. `chains`"
        " and `trees` are beside no drafts. Of smelt-6m on real text, chains of three with up to four branches:\n\n"
        + markdown(
            ("model", "chain's next token right", "a branch right, if one begins where the chain is wrong"), known
        )
        + "\nsmelt-6m:\n\n"
        + markdown(head, map(line, results["small"]))
        + "\nA Llama of 1.1 billion random weights, whose drafts are made right as often as those above:\n\n"
        + markdown(head, map(line, results["big"]))
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


TABLES = {
    "speculation": ResultsTable("speculation", speculation),
    "speculation, AVX2": ResultsTable("speculation_avx2", speculation),
    "speculation, AMX": ResultsTable("speculation_amx", speculation),
    "drafts_on_ranks": ResultsTable("drafts_on_ranks", on_ranks),
    "nested_bits": ResultsTable("nested_bits", nested_bits),
    "drafters": ResultsTable("drafters", drafters),
    "heads": ResultsTable("heads", heads),
    "heads, AMX": ResultsTable("heads_amx", heads),
    "upper_bits": ResultsTable("upper_bits", upper_bits),
    "token_trees": ResultsTable("token_trees", token_trees),
    "token_trees, AVX2": ResultsTable("token_trees_avx2", token_trees),
    "token_trees, AMX": ResultsTable("token_trees_amx", token_trees),
}

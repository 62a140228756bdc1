"""Tables of the runtime: speed, agreement with others, memory."""

from __future__ import annotations

import statistics
from typing import Any

from .table import ResultsTable, markdown

_PEERS = {
    "smelt bf16": "Smelt bfloat16",
    "smelt w8a8": "Smelt W8A8",
    "smelt w8": "Smelt W8A16 (int8 inputs from 3 rows on)",
    "smelt w4": "Smelt W4A16 g128, lm_head too (int8 inputs from 3 rows on)",
    "openvino": "OpenVINO GenAI {version} int4, lm_head in 8 bits",
    "openvino-int8": "OpenVINO GenAI {version} int8",
    "llama.cpp": "llama.cpp Q4_0, lm_head in Q6_K (llama-cpp-python {version})",
    "ctranslate2": "CTranslate2 {version} int8",
    "torchao": "torchao {version} int4",
    "transformers": "transformers {version} bfloat16",
}


def peers(results: Any) -> str:
    """Everyone's tokens a second on this machine."""
    rows = []
    for name, label in _PEERS.items():
        row = results.get(name)
        if row is None:
            continue
        if "failed" in row:
            rows.append((label.format(version=""), f"failed: {row['failed']}", "", ""))
            continue
        together = _rate(row["concurrent_32"])
        if "concurrent_32_static" in row:
            together = f"{together} (`generate_batch`), {_rate(row['concurrent_32_static'])} (`generate`)"
        prompts = " / ".join(filter(None, (_rate(row["prefill_512"]), _rate(row["prefill_1024"]))))
        decode = " / ".join(f"{row[key]:.1f}" for key in ("decode_128", "decode_1024") if row[key])
        rows.append((label.format(**row), prompts, decode, together))
    return markdown(("tokens/s", "prompt 512 / 1024", "decode at 128 / 1024", "32 at once"), rows)


def linears(results: Any) -> str:
    """How long a CPU's linears take beside reading their weights."""
    rows = results["rows"]
    counts = list(rows[0]["beside_read"])
    speeds = {row["columns"]: row["read_gb_s"] for row in rows}
    reads = "; ".join(f"{low} to {high} GB/s beside rows of {columns}" for columns, (low, _, high) in speeds.items())
    head = ("weight", "length of rows", *(f"{count} row{'s' if count != '1' else ''}" for count in counts))
    lines = [(row["kind"], str(row["columns"]), *(f"{row['beside_read'][n]:.2f}" for n in counts)) for row in rows]
    return (
        f"Times of linears with weights of 67 million values, beside reading as many bytes; medians of {results['turns']} turns. The middle half of the reads"
        f" had {reads}.\n\n" + markdown(head, lines)
    )


def two_checkouts_models(results: Any) -> str:
    """Whole models with this checkout beside another."""
    by_model: dict[str, dict[str, float]] = {}
    for row in results["rows"]:
        by_model.setdefault(row["model"], {})[row["load"]] = row["ratio"]
    loads = list(next(iter(by_model.values())))
    lines = [(model, *(f"{ratios[load]:.2f}" for load in loads)) for model, ratios in by_model.items()]
    tokens = "All tokens are the same" if results["same_bits"] else "Tokens differ"
    return _beside(results, tokens) + markdown(("model", *loads), lines)


def two_checkouts(results: Any) -> str:
    """This checkout's kernels beside another's."""
    by_kind: dict[tuple[str, int], dict[int, float]] = {}
    for row in results["rows"]:
        by_kind.setdefault((row["kind"], row["columns"]), {})[row["rows"]] = row["ratio"]
    counts = list(next(iter(by_kind.values())))
    head = ("codes", "length of rows", *(f"{count} row{'s' if count != 1 else ''}" for count in counts))
    lines = [(kind, str(columns), *(f"{ratios[n]:.2f}" for n in counts)) for (kind, columns), ratios in by_kind.items()]
    bits = "All results have the same bits" if results["same_bits"] else "Results differ"
    return _beside(results, bits) + markdown(head, lines)


def _beside(results: Any, same: str) -> str:
    turns = f"medians of {results['turns']} turns, in which either came first"
    return f"Times beside those of commit {results['other']}, {turns}. {same}.\n\n"


def small(results: Any) -> str:
    """A model that the cache holds."""
    ours, theirs = results["smelt-6m"], results["smelt-6m transformers"]
    return markdown(
        ("smelt-6m, decode at 128", "tokens/s"),
        [("Smelt", _rate(ours["decode_128"])), ("transformers", _rate(theirs["decode_128"]))],
    )


def vllm(results: Any) -> str:
    """Beside vLLM, in turns."""
    loads = {
        "prefill_512": "prompt 512",
        "prefill_1024": "prompt 1024",
        "decode_128": "decode at 128",
        "decode_1024": "decode at 1024",
        "concurrent_32": "32 at once",
    }
    names = {"vllm w8a8": "W8A8", "vllm w4": "W4A16 g128 (Smelt: int8 inputs from 3 rows on)", "vllm bf16": "bfloat16"}
    rows = [(label, *(_turns(results[name]["turns"][load]) for load in loads)) for name, label in names.items()]
    return markdown(("Smelt, vLLM (ratio)", *loads.values()), rows)


def _turns(load: dict[str, Any]) -> str:
    digits = 0 if load["ours"] >= 100 else 1
    return f"{load['ours']:.{digits}f}, {load['theirs']:.{digits}f} ({load['ratio']:.2f})"


def simulator(results: Any) -> str:
    """The simulator beside the engine, on what the calibration has not seen."""
    names = {"completion": "completion", "between_tokens": "between tokens", "first_token": "first token"}
    rows = []
    for name, loads in results["configurations"].items():
        for load, row in loads.items():
            cells = [
                f"{row[key]['median_error']:.0%} ({row['again'][key]:.0%}), {row[key]['error_of_p99']:+.0%}"
                for key in names
            ]
            rows.append((f"{name}, {load}", f"{1e3 * row['completion']['measured_mean']:.0f} ms", *cells))
    every = [row for loads in results["configurations"].values() for row in loads.values()]
    medians = [
        f"{statistics.median(row[key]['median_error'] for row in every):.1%}"
        f" ({statistics.median(row['again'][key] for row in every):.1%})"
        for key in names
    ]
    rows.append(("median", "", *medians))
    return markdown(("error per request (of a second run), of p99", "mean completion", *names.values()), rows)


def reproducible(results: Any) -> str:
    """What ``reproducible=True`` costs."""
    loads = list(next(iter(results.values())))
    rows = []
    for name, row in results.items():
        cells = [
            f"{row[load]['usual']:.0f}, {row[load]['reproducible']:.0f} ({row[load]['time']:.2f})" for load in loads
        ]
        rows.append((name, *cells))
    return markdown(("tokens/s without, with (time)", *loads), rows)


def busy(results: Any) -> str:
    """Beside a process that keeps one core busy."""
    loads = {"decode": "one request", "decode_8": "eight requests", "prefill": "a prompt"}
    rows = []
    for threads in ("1 threads", "2 threads"):
        for state in ("quiet", "disturbed"):
            label = f"{threads.replace('1 threads', '1 thread')}, {'beside a busy process' if state == 'disturbed' else state}"
            rows.append((label, *(f"{results[threads][f'{load} {state}']:.0f}" for load in loads)))
    return markdown(("tokens/s", *loads.values()), rows)


def first_choices(results: Any) -> str:
    """Positions, of 1,600, at which the most likely token is the same."""
    labels = {
        "transformers, sdpa and eager": "transformers with `sdpa`, and with `eager`",
        "compiled kernels and sdpa": "Smelt's compiled kernels, and transformers with `sdpa`",
        "torch operators and sdpa": "Smelt on torch's operators, and transformers with `sdpa`",
    }
    rows = [(label, *(str(one[key]) for one in results.values())) for key, label in labels.items()]
    return markdown(("", *results), rows)


def harness(results: Any) -> str:
    """lm-eval's accuracies on the engine and on lm-eval's own model."""
    ways = ("smelt, float32", "hf, float32", "smelt, as served", "hf, bfloat16")
    rows = []
    for row in results["rows"]:
        metrics = row["metrics"]
        name = "acc" if "acc" in metrics[ways[0]] else next(iter(metrics[ways[0]]))
        cells = [f"{metrics[way][name]:.4f}" if way in metrics else "" for way in ways]
        rows.append((row["model"], row["task"].removeprefix("shared_"), name, *cells))
    return markdown(("model", "task", "metric", *ways), rows, left=3)


def memory(results: Any) -> str:
    """A model four times the memory limit."""
    rows = [
        ("weights", f"{results['weights_bytes'] / 1e6:,.0f} MB"),
        ("limit on the process's data memory", f"{results['limit_bytes'] / 1e6:,.0f} MB"),
        ("peak resident memory", f"{results['peak_rss_bytes'] / 1e6:,.0f} MB"),
        ("time, with other work beside it", f"{results['seconds']:.0f} s"),
    ]
    return markdown((f"{results['rounding']}, {results['blocks']} blocks", ""), rows)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


TABLES = {
    "runtime": ResultsTable("runtime_cpu", peers),
    "runtime, AVX2": ResultsTable("runtime_cpu_avx2", peers),
    "runtime, smelt-6m": ResultsTable("runtime_cpu", small),
    "vllm": ResultsTable("runtime_cpu_vllm", vllm),
    "vllm, AMX": ResultsTable("runtime_cpu_vllm_amx", vllm),
    "linears of a CPU": ResultsTable("cpu_linears", linears),
    "linears of a CPU, AMX": ResultsTable("cpu_linears_amx", linears),
    "two checkouts, AVX2": ResultsTable("kernels_avx2", two_checkouts),
    "two checkouts, models, AVX2": ResultsTable("models_avx2", two_checkouts_models),
    "two checkouts, models, AMX": ResultsTable("models_amx", two_checkouts_models),
    "reproducible": ResultsTable("reproducible", reproducible),
    "busy neighbour": ResultsTable("busy_neighbour", busy),
    "simulator": ResultsTable("simulator", simulator),
    "first choices": ResultsTable("first_choices", first_choices),
    "harness": ResultsTable("harness_agreement", harness),
    "memory limit": ResultsTable("memory_limit", memory),
}

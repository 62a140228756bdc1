"""The card of a draft head: its ``README.md`` for the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ...models.directory.directory import ModelDirectory
from ..results.report import ReportData
from .card import base_name, portable, taken_over
from .markdown import plain, shown
from .tables.speed_tables import draft_table

_VLLM = """vllm serve MODEL --speculative-config '{"method": "eagle3", "model": "PATH", "num_speculative_tokens": 3}'"""


def head_card(report: ReportData, checkpoint: Path, original: ModelDirectory, record: dict[str, Any]) -> str:
    """The card's text, without paths of this machine.

    Args:
        report: what the head gains the model.
        checkpoint: the head's directory.
        original: the model that it drafts for.
        record: how it was made, as ``smelt.json`` has it.
    """
    base = base_name(original)
    metadata = taken_over(checkpoint, original) | {"tags": ["smelt", "eagle3", "speculative-decoding"]}
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip()
    made = {name: record[name] for name in ("states_after_layers", "draft_vocabulary", "scheme", "settings")}
    source = record["settings"]["data"]["source"]
    done = str(record["done"]).replace(source, portable(source))
    out = ["---", front, "---", "", f"# {plain(base.removeprefix('builtin:').rpartition('/')[2])}, draft head", ""]
    out += [
        f"A draft head (EAGLE-3.1) for {plain(base)}, made by Smelt {plain(report.versions.get('smelt', ''))}: it proposes tokens, which the"
        " model verifies several at a time, so that its output stays its own. It is of no use by itself.",
        "",
        f"It was {plain(done)}.",
        "",
        *([] if (gains := draft_table(report)) is None else shown(gains)),
        f"Measured on Smelt's runtime, {report.machine.cores} cores of {plain(report.machine.processor)}.",
        "",
        "## Use",
        "",
        "MODEL is what it was made for; PATH is where this is.",
        "",
        "```sh",
        "smelt serve MODEL --drafter PATH",
        _VLLM,
        "```",
        "",
        "## Settings",
        "",
        "```json",
        json.dumps(portable(made), indent=2),
        "```",
        "",
    ]
    return "\n".join(out)

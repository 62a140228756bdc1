"""Items of public benchmarks, read from the folder beside the repository as lm-eval's own tasks read them."""

from __future__ import annotations

import bz2
import json
import re
from pathlib import Path

from datasets import Dataset

_DATA = Path(__file__).parents[2].parent / "shared" / "data" / "eval"
_ARC = re.compile(
    r"the correct answer to the question: (?P<question>.*)\n\n(?P<answers>Answer1: .*)\n\nAnswer format:", re.S
)

Splits = dict[str, Dataset]


def lambada(**_: object) -> Splits:
    """LAMBADA's test half: ``text``."""
    return {"test": Dataset.from_list(_jsonl("lambada/lambada_test.jsonl"))}


def blimp(name: str, **_: object) -> Splits:
    """Minimal pairs of one phenomenon: ``sentence_good`` and ``sentence_bad``."""
    return {"train": Dataset.from_list(_jsonl(f"blimp/{name}.jsonl"))}


def hellaswag(**_: object) -> Splits:
    """Beginnings and four ends each: ``query``, ``choices``, ``label``."""
    lines = bz2.decompress((_DATA / "hellaswag/hellaswag_val_full.txt.bz2").read_bytes()).decode().splitlines()
    items = [
        {"query": lines[i], "label": int(lines[i + 1]), "choices": lines[i + 2 : i + 6]}
        for i in range(0, len(lines), 6)
    ]
    return {"validation": Dataset.from_list(items)}


def piqa(**_: object) -> Splits:
    """Goals and two ways each: ``goal``, ``sol1``, ``sol2``, ``label``."""
    labels = (_DATA / "piqa/valid-labels.lst").read_text().split()
    items = [item | {"label": int(label)} for item, label in zip(_jsonl("piqa/valid.jsonl"), labels, strict=True)]
    return {"validation": Dataset.from_list(items)}


def arc(name: str, **_: object) -> Splits:
    """Questions of school exams, taken out of their instructions: ``question``, ``choices``, ``answer``."""
    items = []
    for row in json.loads((_DATA / name / "test.json").read_text()):
        found = _ARC.search(row["instruction"])
        assert found, row["instruction"]
        choices = re.split(r"\s*Answer\d: ", found["answers"])[1:]
        answer = int(row["answer"].removeprefix("answer")) - 1
        items.append({"question": found["question"].strip(), "choices": choices, "answer": answer})
    return {"test": Dataset.from_list(items)}


def gsm8k(**_: object) -> Splits:
    """Problems in words with worked answers: ``question``, ``answer``."""
    return {split: Dataset.from_list(_jsonl(f"gsm8k/{split}.jsonl")) for split in ("train", "test")}


def _jsonl(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (_DATA / name).read_text(encoding="utf-8").splitlines() if line]

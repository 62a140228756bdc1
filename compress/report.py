"""The report of a run: the same numbers as JSON, as Markdown and on the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.machine import human_bytes
from .safetensors_file import write_text

_SHOWN_LAYERS = 10


@dataclass(frozen=True)
class Report:
    """What a run found. ``data`` is what ``report.json`` holds.

    ``data`` has ``model``, ``checkpoint`` (bytes before and after), ``reload``, ``evaluation`` (absent if
    nothing was measured), ``layers`` (worst first) and ``warnings``.
    """

    data: dict[str, Any]

    def save(self, directory: Path) -> None:
        """Write ``report.md``, then ``report.json``, whose presence says that the run is complete."""
        write_text(directory / "report.md", self.markdown())
        write_text(directory / "report.json", json.dumps(self.data, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read a saved ``report.json``."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def sentences(self) -> list[str]:
        """The findings in a few lines."""
        size = self.data["checkpoint"]
        lines = [
            f"size: {human_bytes(size['original_bytes'])} -> {human_bytes(size['bytes'])}"
            f" ({size['original_bytes'] / size['bytes']:.2f}x smaller; quantized linears"
            f" {size['linear_bits_before']:.2f} -> {size['linear_bits']:.2f} bits per weight)"
        ]
        found = self.data.get("evaluation")
        if found:
            lines.append(
                f"perplexity: {found['perplexity_original']:.2f} -> {found['perplexity_compressed']:.2f}"
                f" ({_percent(found['perplexity_ratio'])}{_interval(found['perplexity_ratio_95'])};"
                f" {found['windows']} x {found['length']} tokens of {found['text']})"
            )
            lines.append(
                f"against the original: KL {found['kl']:.4f} nats a token, same first choice"
                f" {100 * found['top1_agreement']:.1f}% of the time; read by {found['computed_by']}"
            )
        else:
            lines.append("accuracy: not measured (evaluate: false)")
        lines.append(f"reload: {self.data['reload']['sentence']}")
        return lines

    def markdown(self) -> str:
        """The report as Markdown."""
        data = self.data
        out = [f"# {data['model']} compressed by Smelt", ""]
        out += [f"- {line}" for line in self.sentences()]
        out += ["", "## Layers, worst first", ""]
        out += ["| layer | scheme | relative output error | weight shape |", "|---|---|---:|---|"]
        out += [
            f"| {r['name']} | {r['scheme']} | {_error(r['error'])} | {r['shape'][0]} x {r['shape'][1]} |"
            for r in data["layers"]
        ]
        out += [
            "",
            "The error is |X(W - Q)| / |XW| over a sample of the calibration inputs X that the quantized"
            " blocks before the layer produce.",
        ]
        if data["warnings"]:
            out += ["", "## Warnings", ""] + [f"- {warning}" for warning in data["warnings"]]
        out += ["", "## Recipe", "", "```json", json.dumps(data["recipe"], indent=2), "```", "", "## Made with", ""]
        out += [f"- {name} {version}" for name, version in data["versions"].items()]
        return "\n".join(out) + "\n"

    def terminal(self) -> str:
        """The report as plain text for a terminal."""
        lines = self.sentences()
        worst = self.data["layers"][:_SHOWN_LAYERS]
        width = max(len(record["name"]) for record in worst)
        lines += ["", f"relative output error by layer, worst {len(worst)} of {len(self.data['layers'])}:"]
        lines += [f"  {record['name']:<{width}}  {_error(record['error'])}" for record in worst]
        if self.data["warnings"]:
            lines += ["", "warnings:"] + [f"  {warning}" for warning in self.data["warnings"]]
        return "\n".join(lines)


def worst_first(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by falling error; layers that no token reached come first, since nothing is known of them."""
    return sorted(layers, key=lambda r: (-(float("inf") if r["error"] is None else r["error"]), r["name"]))


def _error(value: float | None) -> str:
    return "no token reached it" if value is None else f"{value:.4f}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f}%"


def _interval(bounds: list[float] | None) -> str:
    if bounds is None:
        return ""
    noise = ", within noise" if bounds[0] <= 1 <= bounds[1] else ""
    return f", 95% interval {_percent(bounds[0])} to {_percent(bounds[1])}{noise}"

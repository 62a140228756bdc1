"""A plan for a terminal."""

from __future__ import annotations

from ...system.hardware.machine import human_bytes
from .figures import Figures
from .planner import PlanEntry, ServingPlan
from .targets import show_rate, show_seconds

SHOWN = 12


def plan_table(found: ServingPlan, *, everything: bool = False) -> str:
    """The plan as text: what it rests on, the candidates, and the recommendation.

    Args:
        found: the plan.
        everything: all candidates instead of the best dozen.
    """
    device, load = found.device, found.load
    if device.kind == "calibrated":
        trust = f"fitted to steps measured there; configurations left out of the fit were within {device.spread:.0%}"
    else:
        trust = f"PREDICTED from constants, never measured there; an error of {device.spread:.0%} is assumed"
    shown = found.planned if everything else found.planned[:SHOWN]
    outside = dict.fromkeys(each for one in shown[: 1 if found.recommended else None] for each in one.outside)
    lines = [
        f"model      {found.model.name}, {' + '.join(found.model.schemes)}, {human_bytes(found.model.weight_bytes)}",
        f"device     {f'{load.devices} x ' if load.devices > 1 else ''}{device.name}, {human_bytes(load.memory_bytes)} to plan with",
        f"load       sequences of {load.context:,} tokens, batch {load.batch}, prompts in chunks of {load.max_num_batched_tokens}",
        f"times      {trust}",
        *(f"outside the calibrated range: {each}" for each in outside),
        *([f"targets    {', '.join(map(str, found.targets))}"] if found.targets else []),
        "",
    ]
    measured = any(each.measured for each in found.planned)
    heads = ["", "weights", "needs", "sequences", "tokens/s", f"batch {load.batch}", "TTFT", "J/token"]
    if measured:
        prompt = next(each.measured.prompt for each in found.planned if each.measured)
        heads += [f"measured tokens/s after {prompt}", f"measured TTFT of {prompt}"]
    rows = [heads, *([_row(each, measured) for each in shown])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    notes = ["", *(_notes(each) for each in shown)]
    for row, note in zip(rows, notes, strict=True):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append(f"{'  '.join(cells)}{f'  {note}' if note else ''}".rstrip())
    if len(shown) < len(found.planned):
        lines.append(f"… and {len(found.planned) - len(shown)} more: --all")
    if found.recommended is not None:
        why = "meets the targets" if found.targets else "fits"
        lines += ["", f"recommended: {found.recommended.candidate.label}, the least compressed that {why}"]
        lines += [f"if times are {device.spread:.0%} longer: {each}" for each in found.doubts]
    return "\n".join(lines)


def _row(each: PlanEntry, measured: bool) -> list[str]:
    figures: Figures = each.figures
    row = [
        each.candidate.label,
        human_bytes(figures.weight_bytes),
        human_bytes(figures.memory_bytes),
        f"{figures.sequences:,}",
        show_rate(figures.tokens_per_second),
        "-" if figures.throughput is None else show_rate(figures.throughput),
        show_seconds(figures.first_token),
        "-" if figures.joules is None else f"≤ {figures.joules:.2f}",
    ]
    if measured:
        timed = each.measured
        row += ["-", "-"] if timed is None else [
            show_rate(timed.tokens_per_second), show_seconds(timed.prompt / timed.prefill_rate)
        ]  # fmt: skip
    return row


def _notes(each: PlanEntry) -> str:
    notes = [*([] if each.figures.fits else ["does not fit"]), *each.misses, *each.candidate.notes]
    if each.figures.offload is not None:
        notes.append(each.figures.offload.sentence())
    if each.no_gain_over is not None:
        notes.append(f"gains nothing over {each.no_gain_over}")
    if each.outside:
        notes.append("outside the calibrated range")
    return "; ".join(notes)

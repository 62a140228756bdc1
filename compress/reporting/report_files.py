"""A report's files: ``report.json``, ``report.md``, ``report.html`` and ``pareto.svg``, all of the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

from ...system.errors import SmeltError
from ...system.settings.checked import checked
from ...system.storage.files import write_text
from ...system.storage.paths import irregular, named_path
from ..results.report import SCHEMA, ReportData
from .markdown import markdown
from .page.page import page
from .plot.pareto import pareto_svg

PLOT = "pareto.svg"


def save(report: ReportData, directory: Path) -> None:
    """Write all files, ``report.json`` last: its presence says that the others are there."""
    plot = pareto_svg(report)
    if plot is None:
        (directory / PLOT).unlink(missing_ok=True)
    else:
        write_text(directory / PLOT, plot)
    write_text(directory / "report.html", page(report))
    write_text(directory / "report.md", markdown(report, PLOT if plot else None))
    write_text(directory / "report.json", json.dumps(report.as_data(), indent=2) + "\n")


def load(path: Path) -> ReportData:
    """Read a ``report.json``, or that of a directory.

    Raises:
        SmeltError: there is none, or it is of another kind.
    """
    path = named_path(path)
    file = path / "report.json" if path.is_dir() else path
    strange = irregular(file)
    if strange is not None:
        raise SmeltError(f"{file}: cannot be read (it is {strange}); give a report.json or the directory it is in")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SmeltError(
            f"{file}: cannot be read ({error.strerror}); give a report.json or the directory it is in"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SmeltError(f"{file}: is not JSON ({error}); give a report.json that Smelt wrote") from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise SmeltError(f"{file}: its schema is {found!r}, and this Smelt reads {SCHEMA!r}; measure again")
    changed = "the file was changed after Smelt wrote it"
    return checked(ReportData, data, lambda place, what: f"{file}: {place}: {what}; {changed}", most=1)

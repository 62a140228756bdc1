"""Plain text files are cut into the same documents however they are read, and in time that grows with them alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.models.text import text_source


def _at_once(text: str, piece: int) -> list[str]:
    """What the reader is to give: all up to the last empty line of what it has read, once that is more than a piece."""
    found, kept = [], ""
    for start in range(0, len(text) + 1, piece):
        kept += text[start : start + piece]
        cut = kept.rfind("\n\n")
        if cut > 0 and len(kept) > piece and start < len(text):
            found.append(kept[:cut])
            kept = kept[cut + 2 :]
    return [*found, kept]


@pytest.mark.parametrize("end", ["\n", "\n\n", "\n\n\n", " ", "\r\n\r\n"])
@pytest.mark.parametrize("count", [1, 7, 60])
def test_documents_are_those_of_the_whole(
    end: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_source, "_PIECE", 64)
    text = end.join(f"the {i}th line, which is {'so ' * (i % 9)}long" for i in range(count))
    (tmp_path / "text.txt").write_bytes(text.encode())
    assert list(text_source._plain(tmp_path / "text.txt")) == _at_once(text, 64)

"""New directories: one command at a time puts one together, and what was there stays until it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.system.errors import SmeltError
from smelt.system.storage.new_directory import appearing


def _put(staging: Path, text: str) -> None:
    staging.mkdir()
    (staging / "weights").write_text(text)


def test_a_second_command_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    output = tmp_path / "made"
    with appearing(output, 1) as staging:
        _put(staging, "first")
        with pytest.raises(SmeltError, match="another command is writing"), appearing(output, 1):
            pass
        assert (staging / "weights").read_text() == "first"
    assert (output / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_what_was_there_comes_back_if_the_new_one_cannot_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, rename = tmp_path / "made", Path.rename
    with appearing(output, 1) as staging:
        _put(staging, "first")

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(SmeltError, match="cannot be written"), appearing(output, 1) as staging:
        _put(staging, "second")
    assert (output / "weights").read_text() == "first"

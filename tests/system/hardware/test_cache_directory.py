"""Where what can be made again is kept, also for users without a home, or whose home cannot be written."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from smelt.system.hardware.machine import cache_directory, usual_cache_directory


@pytest.fixture(autouse=True)
def own_temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert cache_directory() == usual_cache_directory() == tmp_path / "caches" / "smelt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "smelt"


@pytest.mark.parametrize("why", ["a file", "no home"])
def test_where_it_cannot_be_used(
    why: str, monkeypatch: pytest.MonkeyPatch, own_temporary: Path, tmp_path: Path
) -> None:
    if why == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:

        def nowhere() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", nowhere)
    found = cache_directory()
    assert found == own_temporary / f"smelt-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert cache_directory() == found
    # What another user may have put there is not loaded.
    found.chmod(0o777)
    assert cache_directory().name.startswith("smelt-")
    assert cache_directory() != found
    assert cache_directory() == cache_directory()

"""Where the kernels cannot be compiled or run, the reason is said."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from smelt.runtime.native import library


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    said: list[str] = []
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "processor_features", lambda: frozenset(library._NEEDED))
    assert library.kernels(said.append) is None
    assert "cannot be compiled" in said[-1]
    assert "torch's operators" in said[-1]
    assert "a C++ compiler is needed" in said[-1]


def test_what_else_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that finds no headers, as on Debian without python3-dev."""
    real = shutil.which("c++")
    if real is None:
        pytest.skip("no compiler here")
    compiler = tmp_path / "c++"
    missing = "echo 'a.cpp:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {missing};; *) exec {real} "$@";; esac\n')
    compiler.chmod(0o755)
    said: list[str] = []
    monkeypatch.setattr(library, "_found", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "processor_features", lambda: frozenset(library._NEEDED))
    assert library.kernels(said.append) is None
    assert "Python's headers (python3-dev)" in said[-1]


def test_without_the_instructions_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(library, "processor_features", lambda: frozenset({"avx512f"}))
    assert library.kernels(said.append) is None
    assert "has no avx2, bmi2, f16c, fma:" in said[0]

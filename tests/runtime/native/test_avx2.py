"""The kernels as processors without AVX-512 run them, on one that has it; and as another compiler makes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from smelt.runtime.native import library

HERE = Path(__file__).parent
_FOR_AVX2 = """
import sys
import pytest
from smelt.runtime.native import library
library._FLAGS = tuple(flag.replace("native", "x86-64-v3") for flag in library._FLAGS)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow  # compiles all kernels again
def test_they_pass_the_same_tests(tmp_path: Path) -> None:
    if "avx512_vnni" not in library.processor_features():
        pytest.skip("this processor has no AVX-512 VNNI: the other tests run these kernels already")
    files = [str(HERE / name) for name in ("test_native.py", "test_tiles.py", "test_draw_tokens.py", "test_nested.py")]
    done = subprocess.run(
        [sys.executable, "-c", _FOR_AVX2, "-n", "0", "-q", "-m", "not slow", *files],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert list(tmp_path.glob("smelt/*/smelt_native.so"))


@pytest.mark.slow  # compiles all kernels again
def test_clang_compiles_them_to_the_same(tmp_path: Path) -> None:
    if shutil.which("clang++") is None:
        pytest.skip("no clang++ here")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rs", "-m", "not slow", str(HERE / "test_native.py")],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": "clang++"},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "cannot be compiled" not in done.stdout, done.stdout[-2000:]

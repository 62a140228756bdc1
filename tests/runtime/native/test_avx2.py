"""The kernels as processors without AVX-512 run them, on one that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from smelt.runtime.native import library

HERE = Path(__file__).parent


@pytest.mark.slow  # compiles all kernels again
def test_they_pass_the_same_tests(tmp_path: Path) -> None:
    if "avx512_vnni" not in library.processor_features():
        pytest.skip("this processor has no AVX-512 VNNI: the other tests run these kernels already")
    files = [str(HERE / name) for name in ("test_native.py", "test_draw_tokens.py", "test_nested.py")]
    own = {"CXXFLAGS": "-march=x86-64-v3", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "not slow", *files]
    done = subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False, cwd=HERE.parents[2]
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert list(tmp_path.glob("smelt/*/smelt_native.so"))

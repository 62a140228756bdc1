"""Requests that schemathesis makes from the server's own OpenAPI description, valid and not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from smelt.runtime.engine.engine import Engine

from ...tiny import SMELT_6M
from .serving import served, serving

# What its own description says of a server's answers, and no failure of its own. Others are about styles of design.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance"


@pytest.mark.slow
def test_no_request_makes_the_server_fail_or_break_its_own_description(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("st")
    if not program.exists():
        pytest.skip("needs schemathesis, which is in the dev extra")
    # Short, so that valid requests end soon.
    engine = Engine(SMELT_6M, max_model_len=96, max_num_seqs=8, quiet=True)
    with serving([served(engine)]) as server:
        command = [
            str(program), "run", f"{server.url}/openapi.json", "--checks", CHECKS, "--max-examples", "40", "--seed", "1",
            "--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--no-color",
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
        ends = time.monotonic() + 20
        while engine.has_work:
            assert time.monotonic() < ends, "a request has not ended"
            time.sleep(0.05)

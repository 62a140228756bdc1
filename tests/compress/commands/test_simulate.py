"""``smelt simulate``: what it prints and writes, and the sentences for what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from smelt.compress.cli import app
from typer.testing import CliRunner, Result

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{10 + i // 4:02}.{25 * (i % 4):02}00000,{20 + 7 * i % 60},{1 + 5 * i % 40}\n" for i in range(80)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    return path


def _simulate(*options: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *options])


def test_policies_side_by_side_as_json(trace: Path, tiny: Callable[..., Path]) -> None:
    found = _simulate(
        "--trace", str(trace), "--model", str(tiny()), "--device", "h100-sxm", "--json", "--policy", "fcfs", "--policy", "mlfq"
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    assert [each["policy"] for each in data["policies"]] == ["fcfs", "mlfq"]
    assert data["device"]["times"] == "predicted"
    for each in data["policies"]:
        assert each["requests"] == 80
        low, high = each["intervals"]["completion_mean"]
        assert low < each["completion"]["mean"] < high


def test_a_page_and_its_numbers_appear(trace: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = _simulate("--trace", str(trace), "--model", str(tiny()), "--device", "a100-sxm-80gb", "--output", str(out))
    assert found.exit_code == 0, found.output
    data = json.loads((out / "simulation.json").read_text())
    page = (out / "simulation.html").read_text()
    assert f"{data['policies'][0]['output_rate']:,.0f} (" in page
    assert "PREDICTED from constants" in page
    assert "http" not in page.replace("http-equiv", "")
    svg = page[page.index("<figure>") : page.index("</figure>")].removeprefix("<figure>")
    assert len(ElementTree.fromstring(svg).findall(".//polyline")) == 1


@pytest.mark.parametrize("placement", ["replicas:2", "tensor:2", "pipeline:2", "disaggregated:1+1", "hybrid:1+1,50"])
def test_placements(placement: str, trace: Path, tiny: Callable[..., Path]) -> None:
    found = _simulate(
        "--trace", str(trace), "--model", str(tiny()), "--device", "h100-sxm", "--placement", placement, "--json"
    )
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["policies"][0]["requests"] == 80


def test_what_is_left_out_is_counted(trace: Path, tiny: Callable[..., Path]) -> None:
    found = _simulate("--trace", str(trace), "--model", str(tiny()), "--device", "h100-sxm", "--max-model-len", "60")
    rows = [row.split(",") for row in AZURE.splitlines()[1:]]
    longer = sum(int(prompt) + int(output) > 60 for _, prompt, output in rows)
    assert 0 < longer < 80
    assert f"{longer} of 80 requests are longer than 60 tokens" in found.stdout


@pytest.mark.slow
def test_random_requests_of_a_scheme_on_this_machine(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where no calibration is kept
    found = _simulate(
        "--prompts", "uniform:10,60", "--outputs", "fixed:20", "--arrivals", "50", "--requests", "40", "--model",
        str(tiny()), "--scheme", "W4A16", "--group-size", "32", "--device", "cpu",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "W4A16 g32" in found.stdout
    assert "PREDICTED from constants" in found.stdout


def test_small_transfers_take_longer(trace: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The cache holds few sequences, so that they are swapped."""
    device = tmp_path / "small.yaml"
    constants = "{memory_bytes: 8e6, bandwidth: 1e12, flops_bf16: 1e13, host_link: 1e9}"
    device.write_text(f"{{name: small, kind: gpu, constants: {constants}}}")
    means = []
    for megabytes in ("0.002", "2"):
        found = _simulate(
            "--trace", str(trace), "--model", str(tiny()), "--device", str(device), "--host-memory", "0.1", "--swap", "swap",
            "--transfer-mb", megabytes, "--json", "--policy", "mlfq", "--rate", "100000",
        )  # fmt: skip
        assert found.exit_code == 0, found.output
        result = json.loads(found.stdout)["policies"][0]
        assert result["swaps"] > 0
        means.append(result["completion"]["mean"])
    assert means[0] > means[1]


WRONG: dict[str, tuple[list[str], str]] = {
    "a policy": (["--policy", "fifo"], "policy is 'fifo'; it must be fcfs"),
    "a device": (["--device", "h100"], "unknown device 'h100'"),
    "a placement": (["--placement", "tensor"], "placement is 'tensor'"),
    "a scheme": (["--scheme", "W5"], "--scheme: "),
    "a group size alone": (["--group-size", "32"], "--group-size belongs to a scheme"),
    "a group size": (["--scheme", "W4A16", "--group-size", "48"], "not divisible by group_size 48"),
    "a cache": (["--kv-cache-dtype", "int5"], "kv_cache_dtype is 'int5'"),
    "a trace and lengths": (["--prompts", "fixed:3", "--outputs", "fixed:3"], "give either --trace, or both"),
    "a trace": (["--trace", "no.csv"], "no.csv: cannot be read"),
    "a swap mode": (["--swap", "maybe"], "swap is 'maybe'"),
    "a short limit": (["--max-model-len", "5"], "no request of the trace fits into 5 tokens"),
    "little host memory": (["--host-memory", "0.0000001"], "less than a cache block"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str, trace: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    options, sentence = WRONG[what]
    given = {"--trace": str(trace), "--model": str(tiny()), "--device": "h100-sxm"}
    rest = [word for name, value in given.items() if name not in options for word in (name, value)]
    found = _simulate(*rest, *options, "--output", str(tmp_path / "out"))
    assert found.exit_code == 1
    assert sentence in found.stderr
    assert "Traceback" not in found.output
    assert len(found.stderr.splitlines()) <= 3
    assert not (tmp_path / "out").exists()


def test_a_model_that_does_not_fit_is_said(trace: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    device = tmp_path / "small.yaml"
    device.write_text("{name: small, kind: gpu, constants: {memory_bytes: 100000, bandwidth: 1e9, flops_bf16: 1e9}}")
    found = _simulate("--trace", str(trace), "--model", str(tiny()), "--device", str(device))
    assert found.exit_code == 1
    assert "for weights alone" in found.stderr


def test_drawn_lengths_that_are_cut_are_counted(tiny: Callable[..., Path]) -> None:
    found = _simulate(
        "--prompts", "fixed:99999", "--outputs", "fixed:5", "--requests", "5", "--model", str(tiny()), "--device", "h100-sxm"
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "5 of 5 requests are cut to" in found.stdout

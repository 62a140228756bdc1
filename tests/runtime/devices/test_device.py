"""Device files: the shipped ones against each other and the vendors' own ratios, and wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from smelt.runtime import RuntimeProblem
from smelt.runtime.devices.device import CONSTANTS, load_device, shipped_devices

WANTED = [
    "a100-pcie-80gb",
    "a100-sxm-80gb",
    "b200",
    "br100",
    "c600",
    "h100-pcie",
    "h100-sxm",
    "h200",
    "m2-ultra",
    "mi300a",
    "mi300x",
]


def test_the_devices_are_there() -> None:
    assert shipped_devices() == WANTED


@pytest.mark.parametrize("name", WANTED)
def test_every_constant_has_a_source_or_is_called_unverified(name: str) -> None:
    device = load_device(name)
    assert set(device.constants) <= set(CONSTANTS)
    for constant in device.constants.values():
        assert not constant.verified or (constant.source.startswith("https://") and constant.value is not None)


def test_an_h100_reads_llama_as_often_as_its_bandwidth_allows() -> None:
    """Llama-3-8B reads 15.0 GB a token in bfloat16: 223 tokens/s at an H100's 3.35 TB/s."""
    assert load_device("h100-sxm").value("bandwidth") / 15.0e9 == pytest.approx(223, abs=1)


def test_generations_grow() -> None:
    values = [load_device(name).value("bandwidth") for name in ("a100-sxm-80gb", "h100-sxm", "h200", "b200")]
    assert values == sorted(values)
    for name in ("h100-sxm", "h200", "b200", "mi300x"):
        device = load_device(name)
        assert device.value("flops_fp8") / device.value("flops_bf16") == pytest.approx(2, rel=0.01)


def test_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nkind: cpu\nconstants: {bandwidth: 3.6e10, memory_bytes: {value: 24000000000, source: me}}\n"
    )
    device = load_device(str(path))
    assert (device.name, device.value("bandwidth"), device.constants["memory_bytes"].source) == ("mine", 36e9, "me")
    with pytest.raises(
        RuntimeProblem, match=r"mine: flops_bf16 \(dense operations .*\) is not known; give a device file"
    ):
        device.value("flops_bf16")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("constants: {bandwith: 1}", "unknown constant 'bandwith'; .*bandwidth"),
        ("constants: {bandwidth: fast}", "bandwidth is 'fast'; it must be a number above 0"),
        ("constants: {bandwidth: -1}", "it must be a number above 0"),
        ("constants: {bandwidth: .nan}", "it must be a number above 0"),
        ("[1, 2]", "it needs name, kind and constants"),
        ("a: {", "is not a device file"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RuntimeProblem, match=sentence) as found:
        load_device(str(path))
    assert "\n" not in str(found.value)


def test_a_wrong_name_gets_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(RuntimeProblem, match=r"unknown device 'h100-smx'; known: .*h100-sxm"):
        load_device("h100-smx")
    with pytest.raises(RuntimeProblem, match="cannot be read"):
        load_device(str(tmp_path / "nothing.yaml"))

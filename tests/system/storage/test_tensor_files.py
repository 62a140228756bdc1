"""Our reader and writer against the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from smelt.compress import SmeltError
from smelt.system.storage.files import write_text
from smelt.system.storage.tensor_files import SafetensorsFile, TensorInfo, save_tensors, write_safetensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def _tensors() -> dict[str, torch.Tensor]:
    made = {str(dtype): torch.arange(24).remainder(2).view(2, 3, 4).to(dtype) for dtype in DTYPES}
    return made | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 7), "weight": torch.randn(33, 17)}


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, _tensors(), {"format": "pt", "note": "hello"})
    found = load_file(path)
    for name, tensor in _tensors().items():
        if name != "weight":
            assert found[name].dtype == tensor.dtype
            assert torch.equal(
                found[name].view(torch.uint8) if tensor.itemsize == 1 else found[name],
                tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor,
            )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "hello"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = _tensors()
    save_file(tensors, path)
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        found = file.load(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.flatten().tolist() == tensor.flatten().tolist()


def test_a_failure_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(3)})

    def fail() -> torch.Tensor:
        raise SmeltError("the second tensor cannot be had")

    info = TensorInfo(torch.float32, (3,))
    with pytest.raises(SmeltError):
        write_safetensors(path, [("a", info, lambda: torch.zeros(3)), ("b", info, fail)])
    assert torch.equal(load_file(path)["a"], torch.ones(3))
    assert [f.name for f in tmp_path.iterdir()] == ["x.safetensors"]


def test_text_files_appear_whole(tmp_path: Path) -> None:
    write_text(tmp_path / "x.md", "one\n")
    write_text(tmp_path / "x.md", "two\n")
    assert (tmp_path / "x.md").read_text() == "two\n"
    with pytest.raises(SmeltError, match="cannot be written"):
        write_text(tmp_path / "nowhere" / "x.md", "three")

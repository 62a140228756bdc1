"""Hidden states in files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from smelt.system.errors import SmeltError
from smelt.system.storage.activation_store import BATCH_TOKENS, ActivationStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    hidden = torch.randn(37, 100, 24).to(dtype)
    store = ActivationStore((37, 100, 24), dtype, tmp_path / "new")
    for batch in store.batches():
        store.write(batch, hidden[batch].transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(store.read(slice(None)), hidden)
    store.write(slice(3, 5), hidden[:2])
    assert torch.equal(store.read(slice(2, 6)), torch.cat((hidden[2:3], hidden[:2], hidden[5:6])))
    assert store.tokens == 3700
    store.close()
    assert not list((tmp_path / "new").iterdir())


def test_batches_cover_every_window_once_and_stay_small(tmp_path: Path) -> None:
    store = ActivationStore((37, 100, 2), torch.float32, tmp_path)
    batches = list(store.batches())
    assert [i for batch in batches for i in range(37)[batch]] == list(range(37))
    assert all((batch.stop - batch.start) * 100 <= BATCH_TOKENS for batch in batches)
    store.close()


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    store = ActivationStore((8, 512, 256), torch.float32, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(SmeltError, match=r"activations-.*limit.*4\.2 MB were needed"):
            store.write(slice(None), torch.zeros(8, 512, 256))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        store.close()


def test_windows_are_gathered_in_any_order(tmp_path: Path) -> None:
    store = ActivationStore((7, 3, 5), torch.bfloat16, tmp_path)
    hidden = torch.randn(7, 3, 5).to(torch.bfloat16)
    store.write(slice(0, 7), hidden)
    for windows in ([4], [6, 0, 3], [2, 2]):
        assert torch.equal(store.gather(windows), hidden[windows])
    store.close()

"""What is gathered of a layer's inputs, against float64."""

import pytest
import torch
from smelt.quant.layer_stats import StatsCollector


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [8, 256, 600])
def test_the_sums_of_products_are_those_of_float64(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    inputs = (torch.randn(700, columns, generator=generator) * torch.linspace(0.1, 30, columns)).to(dtype)
    unrounded = inputs + torch.randn(700, columns, generator=generator).to(dtype)
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    collector = StatsCollector(columns, len(inputs), hessian=True, shift=True)
    for x, f in zip(inputs.split(300), unrounded.split(300), strict=True):
        collector.add(x, unrounded=f)
    stats = collector.result()
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    x, f = inputs.double(), unrounded.double()
    assert stats.hessian is not None
    assert stats.shift is not None
    expected = x.T @ x / len(x)
    # Sums of products of two columns cancel; float32's error is one of the columns' own sizes.
    sizes = expected.diagonal().sqrt()
    assert ((stats.hessian.double() - expected).abs() <= 1e-6 * sizes[:, None] * sizes).all()
    torch.testing.assert_close(stats.shift.double(), (f - x).T @ x / len(x), rtol=2e-4, atol=2e-4)
    assert torch.equal(stats.hessian, stats.hessian.T)
    assert torch.equal(stats.low.double(), x.amin(0).clamp(max=0))
    assert torch.equal(stats.high.double(), x.amax(0).clamp(min=0))

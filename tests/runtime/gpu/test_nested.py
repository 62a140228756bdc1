"""8-bit codes in two planes on the GPU's kernels, in Triton's interpreter: the same numbers, and the upper plane alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import Recipe, run
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.decoder.model import Model
from smelt.runtime.decoder.prompt_states import prompt_states
from smelt.runtime.engine.setup import loading
from smelt.runtime.gpu.linears import PackedLinear, on_kernels
from smelt.runtime.gpu.nested import NestedGpuOperators
from smelt.runtime.gpu.operators import GpuExperts
from smelt.runtime.kernels.tiles.tile import tiles_of
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.matrix import Matrix

from ..kernels.interpreter import interpreted

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CPU = torch.device("cpu")
PROMPTS = [[1, 5, 9, 5, 9], [3, 4, 3, 4, 7], [11, 12]]
OPTIONS: dict[str, Any] = {
    "dtype": "float16",
    "block_size": 16,
    "max_num_batched_tokens": 48,
    "max_model_len": 64,
    "quiet": True,
}


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "group"), [(96, 256, 128), (80, 320, 64), (64, 128, 128)])
@pytest.mark.parametrize("gate", ["none", "silu"])
def test_planes_give_what_whole_codes_give(rows: int, columns: int, group: int, dtype: torch.dtype, gate: str) -> None:
    draw = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=draw)
    scale = (torch.rand(rows, columns // group, generator=draw) * 0.01 + 0.001).to(dtype)
    matrix, bias = Matrix(codes, "int8", 8, scale), torch.randn(rows, generator=draw).to(dtype)
    whole, planes = (
        on_kernels(matrix, bias, dtype, CPU, tiles_of(CPU), gate, planes=planes) for planes in (False, True)
    )
    assert isinstance(whole, PackedLinear)
    assert isinstance(planes, PackedLinear)
    upper = planes.upper()
    assert upper is not None
    assert whole.upper() is None
    assert planes.nbytes == whole.nbytes
    assert upper.weight.codes is planes.weight.codes
    assert planes.nbytes - upper.nbytes == planes.weight.codes.nbytes  # which are half of the codes
    middles = ((codes >> 4).double() + 0.5).unflatten(1, (-1, group)) * 16 * scale.double().unsqueeze(-1)
    for count in (1, 3, 20):
        x = torch.randn(count, columns, generator=draw).to(dtype)
        assert torch.equal(planes(x), whole(x))
        expected = x.double() @ middles.flatten(1).T + bias.double()
        if gate == "silu":
            first, second = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(first) * second
        assert (upper(x).double() - expected).norm() < (6e-3 if dtype == torch.bfloat16 else 1e-3) * expected.norm()


@pytest.fixture
def engine_of(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on the GPU's kernels of a model in W4in8."""

    def build(architecture: str, **options: Any) -> Engine:
        path = tmp_path / "run" / "checkpoint"
        if not path.exists():
            size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256}
            recipe = {
                "model": str(tiny(architecture, torch.bfloat16, **size)),
                "output": str(tmp_path / "run"),
                "evaluate": False,
                "steps": [{"quantize": {"scheme": "W4in8", "group_size": 32, "rounding": "nearest"}}],
            }
            path = run(Recipe.model_validate(recipe), progress=False).checkpoint
        with monkeypatch.context() as patch:
            patch.setattr(loading, "_operators", lambda dtype, *_, **__: NestedGpuOperators(dtype, CPU))
            return Engine(path, **OPTIONS, **options)

    return build


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "gpt_neox"))]
)
def test_a_model_drafts_for_itself(architecture: str, engine_of: Callable[..., Engine]) -> None:
    """Its tokens are those without drafts, and no memory is taken besides."""
    engine = engine_of(architecture, drafter="nested", draft_tokens=3)
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0),
        SamplingParams(max_tokens=5, ignore_eos=True, seed=3),
        SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, repetition_penalty=1.2),
    ]
    drafted = engine.generate(PROMPTS, params)
    assert engine.drafting is not None
    assert (engine.drafting.total.acceptance or 0) > 0.2  # of random weights; another model's would be one of hundreds
    of_drafter = engine.drafter.model.linears()  # type: ignore[union-attr]
    for name, part in engine.model.linears().items():
        if isinstance(part, PackedLinear):
            assert of_drafter[name].weight.codes is part.weight.codes  # type: ignore[attr-defined]
    alone = engine_of(architecture).generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.slow
def test_requests_are_answered_from_the_upper_bits(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", drafter="nested", upper_bits_at=1, max_num_seqs=1)
    greedy = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    first, _, last = engine.generate([PROMPTS[0], PROMPTS[0], PROMPTS[1]], greedy)
    assert not first.upper_bits
    assert last.upper_bits
    for model, output in ((engine.model, first), (engine.drafter.model, last)):  # type: ignore[union-attr]
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        states = next(prompt_states(model, [tokens[:-1]]))[0]
        said = model.head.logits(states).argmax(-1).tolist()
        assert said[len(output.prompt_token_ids) - 1 :] == output.outputs[0].token_ids


def test_each_part_of_a_mixture_has_its_upper_bits(engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    engine_of("mixtral")
    checkpoint = Checkpoint(tmp_path / "run" / "checkpoint")
    operators = NestedGpuOperators(torch.float16, CPU)
    whole = Model(checkpoint, operators)
    upper_operators = operators.upper()
    assert upper_operators is not None
    upper = Model(checkpoint, upper_operators)
    assert any(isinstance(part, GpuExperts) for part in operators._made)
    for name, part in upper.linears().items():
        if name != "head":
            assert "upper 4 bits" in part.explain(), name
            assert part.nbytes < 0.7 * whole.linears()[name].nbytes, name


def test_what_has_no_planes_is_refused(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_operators", lambda dtype, *_, **__: NestedGpuOperators(dtype, CPU))
    with pytest.raises(RuntimeProblem, match="no weights of 8 bits"):
        Engine(tiny("llama", torch.bfloat16), drafter="nested", **OPTIONS)

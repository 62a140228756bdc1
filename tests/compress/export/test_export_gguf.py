"""The GGUF exporter against gguf's own reader and decoders, and against arithmetic in float64."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, run
from smelt.compress.export.gguf import GgufRecord, _Opened, export_gguf, gguf_limits, gguf_problems
from smelt.compress.export.gguf_file import GgufFile
from smelt.compress.export.gguf_layouts import BY_NAME, LAYOUTS
from smelt.compress.export.gguf_rounding import rounded
from smelt.compress.export.gguf_storage import KINDS, stored
from smelt.runtime.weights.checkpoint import Checkpoint
from smelt.runtime.weights.matrix import FloatCodes, Matrix
from smelt.system.errors import SmeltError
from smelt.system.progress import Progress
from smelt.system.storage import new_directory
from torch import Tensor

from ...packing import awq_packed
from ...tiny import SMELT_6M, make_model, save_model

GENERATOR = torch.Generator().manual_seed(5)
ROWS, COLUMNS = 8, 512


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "scales", "expected"),
    [
        (4, 32, False, torch.bfloat16, "Q4_0"),
        (4, 128, False, torch.float16, "Q4_0"),
        (4, COLUMNS, False, torch.float16, "Q4_0"),
        (4, 128, True, torch.float16, "Q5_0"),
        (4, 256, True, torch.float16, "Q4_K"),
        (4, COLUMNS, True, torch.bfloat16, "Q4_K"),
        (3, 64, False, torch.bfloat16, "Q4_0"),
        (3, 64, True, torch.float16, "Q4_0"),
        (3, 256, False, torch.float16, "Q3_K"),
        (2, 64, True, torch.float16, "Q4_0"),
        (2, 256, False, torch.float16, "Q2_K"),
        (2, COLUMNS, True, torch.float16, "Q2_K"),
        (8, 32, False, torch.float16, "Q8_0"),
        (8, COLUMNS, False, torch.bfloat16, "Q8_0"),
    ],
)
def test_codes_and_scales_are_carried_over_as_they_are(
    bits: int, group: int, zeros: bool, scales: torch.dtype, expected: str
) -> None:
    matrix = _matrix(bits, group, zeros, scales)
    found = stored(matrix, None)
    assert (found.type.name, found.how, found.error) == (expected, "exact", 0.0)
    assert np.array_equal(_decoded(found.data, found.type), _float64(matrix))


def test_a_minimum_that_float16_holds_keeps_asymmetric_codes_in_four_bits() -> None:
    matrix = _matrix(4, 32, True, torch.float16)
    assert matrix.scale is not None
    powers = Matrix(matrix.values, "int4 g32", 4, torch.full_like(matrix.scale, 2.0**-7), matrix.zero)
    found = stored(powers, None)
    assert (found.type.name, found.how) == ("Q4_1", "exact")
    assert np.array_equal(_decoded(found.data, found.type), _float64(powers))
    asked = stored(matrix, "Q4_1")
    assert (asked.type.name, asked.how) == ("Q4_1", "rescaled")
    # A minimum is at most 16 steps; half a unit in the last place of float16 is 2^-11 of it.
    step = matrix.scale.double().repeat_interleave(32, 1).numpy()
    assert (np.abs(_decoded(asked.data, asked.type) - _float64(matrix)) <= step * 16 * 2.0**-11).all()


def test_scales_that_float16_lacks_are_rounded_and_codes_stay() -> None:
    matrix = _matrix(4, 64, False, torch.float32)
    found = stored(matrix, None)
    assert (found.type.name, found.how) == ("Q4_0", "rescaled")
    expected, decoded = _float64(matrix), _decoded(found.data, found.type)
    assert (np.abs(decoded - expected) <= np.abs(expected) * 2.0**-11).all()
    assert found.error == pytest.approx(np.linalg.norm(decoded - expected) / np.linalg.norm(expected), rel=1e-4)


def test_a_scale_of_zeros_alone_does_not_matter() -> None:
    matrix = _matrix(4, 32, False, torch.float32)
    assert matrix.scale is not None
    matrix.values[:, :32] = 0
    scale = matrix.scale.bfloat16().float()
    scale[:, 0] = 1e-30
    found = stored(Matrix(matrix.values, "int4 g32", 4, scale), None)
    assert (found.type.name, found.how) == ("Q4_0", "exact")
    assert not _decoded(found.data, found.type)[:, :32].any()


@pytest.mark.parametrize(
    ("change", "expected"),
    [("order", "Q6_K"), ("group", "Q6_K"), ("float8", "Q8_0"), ("huge", "BF16"), ("minute", "BF16")],
)
def test_what_no_type_holds_is_rounded_anew_and_said(change: str, expected: str) -> None:
    base = _matrix(4, 16 if change == "group" else 64, False, torch.float32)
    assert base.scale is not None
    eight = torch.randn(ROWS, COLUMNS, generator=GENERATOR).to(torch.float8_e4m3fn)
    matrix = {
        "order": replace(base, order=torch.randperm(COLUMNS, generator=GENERATOR)),
        "group": base,
        "float8": Matrix(eight.float(), "float8", 8, floats=FloatCodes(eight, torch.ones(ROWS, 1))),
        "huge": replace(base, scale=base.scale * 1e13),
        "minute": replace(base, scale=base.scale * 1e-12),
    }[change]
    found = stored(matrix, None)
    assert (found.type.name, found.how) == (expected, "requantized")
    exact = matrix.dense(torch.float32).double().numpy()
    error = np.linalg.norm(_decoded(found.data, found.type) - exact) / np.linalg.norm(exact)
    assert found.error == pytest.approx(error, rel=1e-3)
    assert error < 0.02


@pytest.mark.parametrize(
    ("kind", "columns", "expected"),
    [("Q4_K", 96, "Q5_0"), ("Q6_K", 96, "Q8_0"), ("Q2_K", 96, "Q4_0"), ("Q4_0", 172, "F16"), ("Q4_K", 172, "F16")],
)
def test_rows_that_are_no_whole_blocks_take_a_larger_type(kind: str, columns: int, expected: str) -> None:
    weight = torch.randn(4, columns, generator=GENERATOR)
    assert stored(Matrix.plain(weight), kind).type.name == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rounded_weights_mean_what_ggufs_decoder_says(layout: Any) -> None:
    weight = Checkpoint(SMELT_6M).tensor("model.layers.3.mlp.gate_proj.weight")[:128].float()
    blocks = rounded(weight.reshape(-1, layout.size), layout)
    decoded = quants.dequantize(layout.pack(blocks).numpy(), layout.type)
    assert np.array_equal(decoded, blocks.values().numpy())
    found = np.linalg.norm(decoded.ravel() - weight.numpy().ravel())
    # Half of an even grid's step is uniform noise of a twelfth of its square; a normal block is about five deviations wide.
    levels = layout.high - layout.low
    assert found / weight.norm() < 6 / levels / math.sqrt(12) * 1.15
    try:
        theirs = quants.dequantize(quants.quantize(weight.numpy(), layout.type), layout.type)
    except NotImplementedError:
        return
    assert found < np.linalg.norm(theirs - weight.numpy())


def test_four_bits_are_nearly_the_best_that_any_scale_gives() -> None:
    """Against a search over all float16 scales of a block, in float64."""
    values = torch.randn(40, 32, generator=GENERATOR)
    blocks = rounded(values, BY_NAME["Q4_0"])
    found = (blocks.values().double() - values.double()).square().sum(1)
    wide = values.double()
    # Float16's numbers lie in order as their bits do: all of them from a sixteenth to a quarter of the largest weight.
    first = (wide.abs().amax(1, True) / 16).half().view(torch.int16)
    scales = (first + torch.arange(2100, dtype=torch.int16)).view(torch.float16).double()
    scales = torch.cat([scales, -scales], 1).unsqueeze(-1)
    codes = (wide.unsqueeze(1) / scales).round().clamp(-8, 7)
    best = (codes * scales - wide.unsqueeze(1)).square().sum(2).amin(1)
    assert (found >= best * (1 - 1e-6)).all()
    assert found.sum() < 1.03 * best.sum()


def test_the_k_types_are_near_the_bound_of_scales_that_cost_nothing() -> None:
    """A part's best scale and minimum, found in float64 and stored nowhere, is what sharing them can only worsen."""
    values = torch.randn(6, 256, generator=GENERATOR)
    parts = values.double().view(-1, 32)
    low, high = parts.amin(1, True), parts.amax(1, True)
    best = torch.full((len(parts),), torch.inf, dtype=torch.float64)
    for inner in torch.linspace(0, 0.3, 31, dtype=torch.float64):
        for outer in torch.linspace(0, 0.3, 31, dtype=torch.float64):
            least = low + inner * (high - low) / 2
            scale = (high - outer * (high - low) / 2 - least) / 15
            codes = ((parts - least) / scale).round().clamp(0, 15)
            best = torch.minimum(best, (codes * scale + least - parts).square().sum(1))

    def error(name: str) -> float:
        layout = BY_NAME[name]
        return float((rounded(values.view(-1, layout.size), layout).values().view(6, 256) - values).square().sum())

    assert error("Q4_K") < 1.1 * float(best.sum())
    assert error("Q6_K") < error("Q5_0") < error("Q4_K") < error("Q4_0")


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K"])
def test_blocks_without_negative_weights_are_not_lost(name: str) -> None:
    """As a constant block, and most of a pruned weight's: all parts begin at zero, and there is nothing to share among minima."""
    layout = BY_NAME[name]
    sparse = torch.randn(400, 256, generator=GENERATOR) * (torch.rand(400, 256, generator=GENERATOR) < 0.02)
    for values in (torch.full((1, 256), 0.03), sparse[sparse.abs().amax(1) > 0]):
        found = rounded(values.view(-1, layout.size), layout).values().view(len(values), 256)
        assert ((found - values).square().sum(1) < 0.5 * values.square().sum(1)).all()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("W4A16", "Q4_0"), ("W8A16", "Q8_0"), ("W2A16", "Q4_0"), ("NVFP4A16", "NVFP4"), ("MXFP4A16", "MXFP4")],
)
def test_a_file_holds_what_the_checkpoint_does(
    scheme: str, expected: str, tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    group = {"group_size": 32} if scheme in ("W4A16", "W2A16") else {}
    made = run(recipe(tiny("llama", torch.bfloat16), {"evaluate": False}, scheme=scheme, **group, rounding="nearest"))
    record, tensors = _exported(Path(made.checkpoint), tmp_path)
    assert record.tensors[expected].exact == 21
    assert all(carried.rescaled == carried.requantized == 0 for carried in record.tensors.values())
    checkpoint = Checkpoint(made.checkpoint)
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for short, name in names.items():
        tensor = tensors[f"blk.1.{short}.weight"]
        assert tensor.tensor_type.name == expected
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if expected == "NVFP4":
            values = values * tensors[f"blk.1.{short}.scale"].data[0]
        dense = checkpoint.matrix(f"model.layers.1.{name}").dense(torch.bfloat16)
        # Codes times scales are rounded to bfloat16 where the checkpoint's weights are written out.
        found = torch.from_numpy(values).bfloat16()
        if short in ("attn_q", "attn_k"):
            found = _in_halves(found, 32)
        assert torch.equal(found, dense), short
    embedding = tensors["token_embd.weight"]
    assert embedding.tensor_type.name == "BF16"
    expected_embedding = checkpoint.tensor("model.embed_tokens.weight").float().numpy()
    assert np.array_equal(quants.dequantize(embedding.data, embedding.tensor_type), expected_embedding)


@pytest.mark.slow
def test_only_nvfp4_has_factors(tiny: Callable[..., Path], recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """llama.cpp reads them beside that type only, and refuses tensors that it does not ask for."""
    made = run(recipe(tiny("llama", torch.bfloat16), {"evaluate": False}, scheme="NVFP4A16", ignore=[]))
    checkpoint = Path(made.checkpoint)
    for kind, used in ((None, "NVFP4"), ("Q4_0", "Q8_0"), ("F16", "F16")):
        target = tmp_path / f"{used}.gguf"
        export_gguf(checkpoint, target, kind=kind, progress=Progress(enabled=False))
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
        assert tensors["output.weight"].tensor_type.name == used
        assert ("output.scale" in tensors) == ("blk.0.ffn_up.scale" in tensors) == (kind is None)
    # A run's output is called as its model is.
    assert (
        _fields(tmp_path / "F16.gguf")["general.name"]
        == json.loads((checkpoint / "smelt.json").read_text())["model"]["name"].rpartition("/")[2]
    )


def test_room_is_looked_for_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(new_directory, "free_disk", lambda _: 1000)
    with pytest.raises(SmeltError, match=r"are needed and 1.0 kB are free"):
        _exported(SMELT_6M, tmp_path)
    with pytest.raises(SmeltError, match=r"are needed and 1.0 kB are free"):
        export_gguf(SMELT_6M, tmp_path / "q.gguf", kind="Q4_0", progress=Progress(enabled=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_estimate_is_the_files_size(tmp_path: Path) -> None:
    for kind in ("Q4_0", "Q8_0", "F32"):
        record = export_gguf(SMELT_6M, tmp_path / f"{kind}.gguf", kind=kind, progress=Progress(enabled=False))
        assert _Opened(SMELT_6M).nbytes(KINDS[kind]) == pytest.approx(record.bytes, rel=0.1)


def test_tiny_weights_lose_no_more_than_others() -> None:
    """Scales of 256 values are kept in float16, which has few digits so far down."""
    values = torch.randn(64, 256, generator=GENERATOR)
    for name, worst in (("Q6_K", 0.03), ("Q4_K", 0.13)):
        for spread in (1.0, 1e-4):
            found = rounded(values * spread, BY_NAME[name]).values()
            assert float((found - values * spread).norm() / (values * spread).norm()) < worst


def test_sampling_defaults_and_links(tmp_path: Path) -> None:
    shutil.copytree(SMELT_6M, tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 0, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}))
    (tmp_path / "there").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "there" / "file.gguf")
    export_gguf(tmp_path / "model", tmp_path / "link.gguf", kind="Q8_0", progress=Progress(enabled=False))
    assert (tmp_path / "link.gguf").is_symlink()
    fields = _fields(tmp_path / "there" / "file.gguf")
    assert fields["general.sampling.temp"] == pytest.approx(0.6)
    assert fields["general.sampling.top_k"] == 20
    assert fields["general.sampling.top_p"] == pytest.approx(0.95)


@pytest.mark.slow
def test_yarns_attention_factor(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """llama.cpp multiplies it by its own, 1 + 0.1 ln(factor)."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    _exported(tiny("qwen2", rope_parameters=yarn | {"attention_factor": 1.5}), tmp_path)
    found = _fields(tmp_path / "model.gguf")["qwen2.rope.scaling.attn_factor"]
    assert found * (1 + 0.1 * math.log(4)) == pytest.approx(1.5)
    (tmp_path / "model.gguf").unlink()
    _exported(tiny("qwen2", rope_parameters=yarn), tmp_path)
    assert "qwen2.rope.scaling.attn_factor" not in _fields(tmp_path / "model.gguf")


def test_awqs_codes_and_zeros_are_carried_over(tmp_path: Path) -> None:
    model = make_model("llama", tie_word_embeddings=True)
    tensors: dict[str, Tensor] = {}
    dense: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        if "proj" not in name:
            tensors[name] = weight.clone()
            continue
        base, (rows, columns) = name.removesuffix("weight"), weight.shape
        codes = torch.randint(0, 16, (rows, columns), generator=GENERATOR)
        zeros = torch.randint(0, 16, (rows, columns // 32), generator=GENERATOR)
        scale = (torch.rand(rows, columns // 32, generator=GENERATOR) * 0.01 + 0.001).half()
        spread = zeros.repeat_interleave(32, 1)
        dense[base] = ((codes - spread).double() * scale.double().repeat_interleave(32, 1)).numpy()
        tensors |= {f"{base}qweight": awq_packed(codes.T), f"{base}qzeros": awq_packed(zeros.T)}
        tensors[f"{base}scales"] = scale.T.contiguous()
    tensors.pop("lm_head.weight")
    path = save_model(model, tmp_path / "model")
    save_file(tensors, path / "model.safetensors")
    _configure(path, quantization_config={"quant_method": "awq", "bits": 4, "version": "gemm"})
    record, found = _exported(path, tmp_path)
    assert record.tensors["Q5_0"].exact == 21
    assert "output.weight" not in found
    down, query = found["blk.2.ffn_down.weight"], found["blk.0.attn_q.weight"]
    assert np.array_equal(_decoded(down.data, down.tensor_type), dense["model.layers.2.mlp.down_proj."])
    values = _in_halves(torch.from_numpy(_decoded(query.data, query.tensor_type)), 32)
    assert np.array_equal(values.numpy(), dense["model.layers.0.self_attn.q_proj."])


def test_experts_stand_in_one_tensor(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("mixtral")
    _, tensors = _exported(path, tmp_path)
    state = load_file(path / "model.safetensors")
    down = tensors["blk.1.ffn_down_exps.weight"]
    assert list(down.shape) == [256, 128, 4]  # GGUF counts dimensions from the last
    name = next(
        n for n in state if "layers.1" in n and "experts.3." in n and n.endswith(("w2.weight", "down_proj.weight"))
    )
    assert np.array_equal(down.data[3], state[name].numpy())


def test_norms_of_gemma_and_fields_of_its_layers(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("gemma3_text", num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
    _, tensors = _exported(path, tmp_path)
    state = load_file(path / "model.safetensors")
    norm = state["model.layers.2.post_feedforward_layernorm.weight"].numpy() + np.float32(1)
    assert np.array_equal(tensors["blk.2.post_ffw_norm.weight"].data, norm)
    fields = _fields(tmp_path / "model.gguf")
    assert fields["gemma3.attention.sliding_window"] == 16
    assert fields["gemma3.attention.sliding_window_pattern"] == 2
    assert fields["gemma3.rope.freq_base"] == 1e6
    assert fields["gemma3.rope.freq_base_swa"] == 1e4


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        (
            "gemma2",
            {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
            "evenly",
        ),
        ("gemma2", {"attn_logit_softcapping": None}, "has no soft caps"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "caps its logits"),
    ],
)
def test_what_llama_cpp_computes_otherwise_in_gemma(
    architecture: str, changes: dict[str, Any], says: str, tiny: Callable[..., Path]
) -> None:
    """It reads one number for windows, and caps as the published models do."""
    assert any(says in problem for problem in gguf_limits(tiny(architecture, **changes)))


def test_llama_3s_frequencies(tiny: Callable[..., Path], tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    _, tensors = _exported(tiny("llama", rope_parameters=scaling), tmp_path)
    expected = []
    for i in range(16):
        wave = 2 * math.pi * 500000.0 ** (2 * i / 32)
        smooth = min(max((64 / wave - 1) / (4 - 1), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / 8 + smooth))
    assert np.allclose(tensors["rope_freqs.weight"].data, expected, rtol=1e-5)
    assert min(expected) == 1.0
    assert max(expected) == 8.0
    error = _error(tiny("qwen2", rope_parameters=scaling), tmp_path)
    assert "its RoPE scaling is 'llama3', which llama.cpp's QWEN2 does not support" in error


@pytest.mark.parametrize(
    ("architecture", "changes", "sentence"),
    [
        ("opt", {}, "the architecture 'opt' cannot be exported to GGUF"),
        ("qwen3_moe", {"norm_topk_prob": False}, "does not normalize the weights of the chosen experts"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "scales attention scores by a factor other than"),
        ("llama", {"hidden_act": "gelu"}, "its activation is 'gelu'; llama.cpp's LLAMA computes silu"),
        ("qwen3", {"attention_bias": True}, "o_proj has a bias, which llama.cpp's QWEN3 does not support"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "applies RoPE in a pattern other than"),
    ],
)
def test_what_llama_cpp_cannot_do_is_said_before_any_work(
    architecture: str, changes: dict[str, Any], sentence: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    assert sentence in _error(tiny(architecture, **changes), tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("target", "kind", "sentence"),
    [
        ("model.bin", None, "must end in .gguf"),
        ("absent/model.gguf", None, "is not a directory"),
        ("model.gguf", "Q9_9", "unknown type 'Q9_9'; known: F32"),
    ],
)
def test_bad_requests_are_reported(target: str, kind: str | None, sentence: str, tmp_path: Path) -> None:
    problems = gguf_problems(SMELT_6M, tmp_path / target, kind)
    assert len(problems) == 1
    assert sentence in str(problems[0])
    with pytest.raises(SmeltError, match=sentence):
        export_gguf(SMELT_6M, tmp_path / target, kind=kind, progress=Progress(False))


def test_a_missing_weight_is_reported(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")
    assert "model.layers.1.mlp.up_proj.weight: the checkpoint lacks this tensor" in _error(path, tmp_path)


def test_a_file_that_fails_halfway_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"earlier")
    kind = GGMLQuantizationType.F32

    def tensors() -> Iterator[tuple[str, np.ndarray, tuple[int, ...], GGMLQuantizationType]]:
        yield "first", np.ones(4, np.float32), (4,), kind
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GgufFile(target, "llama", {}, {"first": 1, "second": 1}).write(tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert target.read_bytes() == b"earlier"


def test_the_same_checkpoint_gives_the_same_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama", hidden_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    for name in ("one", "two"):
        export_gguf(path, tmp_path / f"{name}.gguf", kind="q4_k", progress=Progress(False))
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    fields = _fields(tmp_path / "one.gguf")
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_K_S
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "one.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == "Q4_K"
    assert types["token_embd.weight"] == "Q6_K"
    assert types["output_norm.weight"] == "F32"


def _matrix(bits: int, group: int, zeros: bool, scales: torch.dtype) -> Matrix:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, (ROWS, COLUMNS), generator=GENERATOR).to(torch.int8)
    codes[:, 0], codes[:, 1] = low, high - 1
    shape = (ROWS, COLUMNS // group)
    scale = (torch.rand(shape, generator=GENERATOR) * 0.02 + 0.001).to(scales)
    zero = None
    if zeros:
        zero = torch.randint(low, high, shape, generator=GENERATOR).to(torch.int8)
        zero[0, 0] = low
    return Matrix(codes, f"int{bits} g{group}", bits, scale, zero)


def _float64(matrix: Matrix) -> np.ndarray:
    """What integer codes mean, without any rounding."""
    assert matrix.scale is not None
    spread = matrix.group
    zero = 0 if matrix.zero is None else matrix.zero.double().repeat_interleave(spread, 1)
    return ((matrix.values.double() - zero) * matrix.scale.double().repeat_interleave(spread, 1)).numpy()


def _decoded(data: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    return quants.dequantize(data, kind).astype(np.float64)


def _in_halves(rows: Tensor, size: int) -> Tensor:
    """llama.cpp's order of a head's rows (0, half, 1, half + 1, …) back to transformers'."""
    each = rows.view(-1, size, rows.shape[1])
    return torch.cat([each[:, 0::2], each[:, 1::2]], 1).reshape(rows.shape)


def _exported(path: Path, folder: Path) -> tuple[GgufRecord, dict[str, Any]]:
    record = export_gguf(path, folder / "model.gguf", progress=Progress(False))
    assert record.bytes == (folder / "model.gguf").stat().st_size
    return record, {tensor.name: tensor for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}


def _fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def _error(path: Path, folder: Path) -> str:
    return "\n".join(str(problem) for problem in gguf_problems(path, folder / "model.gguf", None))


def _configure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))

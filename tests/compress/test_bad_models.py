"""Models that cannot be worked on: one clear sentence each, a non-zero exit, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, run

from ..tiny import make_model, save_model

Run = Callable[[Path], str]


@pytest.fixture
def refused(recipe: Callable[..., Recipe], tmp_path: Path) -> Run:
    """Run a recipe on a model, expect one error, and check that nothing appeared."""

    def call(model: Path | str) -> str:
        with pytest.raises(SmeltError) as caught:
            run(recipe(model, scheme="W8A16", group_size=32))
        out = tmp_path / "out"
        assert not (out / "checkpoint").exists()
        assert not (out / "checkpoint.partial").exists()
        assert not (out / "report.json").exists()
        return str(caught.value)

    return call


def _edit_config(path: Path, **changes: Any) -> None:
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in (data | changes).items() if v is not None}))


def _sharded(tmp_path: Path) -> Path:
    path = save_model(make_model("llama"), tmp_path / "sharded", max_shard_size="1MB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def test_missing_shard(refused: Run, tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"{lost.name} is missing" in refused(path)


def test_a_shard_without_what_the_index_promises(refused: Run, tmp_path: Path) -> None:
    path = _sharded(tmp_path)
    shard = sorted(path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != name}, shard)
    assert name in refused(path)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_truncated_safetensors(keep: float, refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    file = path / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(len(raw) * keep) if isinstance(keep, float) else keep])
    sentence = refused(path)
    assert "model.safetensors" in sentence
    assert "truncated" in sentence or "cut off" in sentence


def test_a_header_of_garbage(refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    (path / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"this is no JSON!" + b"\0" * 64)
    assert "header cannot be understood" in refused(path)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"]
)
def test_weights_that_are_not_finite(poison: float, name: str, refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    tensors = load_file(path / "model.safetensors")
    tensors[name].view(-1)[5] = poison
    save_file(tensors, path / "model.safetensors")
    sentence = refused(path)
    assert name in sentence
    assert "NaN or infinite" in sentence


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 256}, "they belong to different models"),
        ({"num_hidden_layers": 5}, "the checkpoint lacks this tensor"),
        ({"intermediate_size": 300}, "model.layers.0.mlp.gate_proj.weight"),
        ({"num_attention_heads": 3, "head_dim": None}, "config.json"),
        ({"model_type": "no_such_type"}, "transformers cannot open model_type 'no_such_type'"),
        ({"hidden_size": "wide"}, "config.json"),
    ],
)
def test_a_config_that_contradicts_the_tensors(
    changes: dict[str, Any], expected: str, refused: Run, tiny: Callable[..., Path]
) -> None:
    path = tiny()
    _edit_config(path, **changes)
    assert expected in refused(path)


def test_a_config_that_is_missing_or_damaged(refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    (path / "config.json").write_text("{")
    assert "is not valid JSON" in refused(path)
    (path / "config.json").unlink()
    assert "has no config.json" in refused(path)


def test_an_encoder(refused: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "BertForMaskedLM is not a causal language model" in refused(tmp_path / "bert")


def test_an_encoder_decoder(refused: Run, tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert "no decoder-only language model" in refused(tmp_path / "t5")


def test_pickle_only_weights_are_refused_unread(refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    sentence = refused(path)
    assert "pickle" in sentence
    assert "convert them to safetensors" in sentence


def test_remote_code_runs_only_when_asked_for(
    refused: Run, recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny()
    code = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({proof!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
""".format(proof=str(tmp_path / "it-ran"))
    (path / "own.py").write_text(code)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    _edit_config(path, model_type="own_llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    assert "trust_remote_code: true" in refused(path)
    assert not (tmp_path / "it-ran").exists()
    result = run(recipe(path, {"trust_remote_code": True, "evaluate": False}, scheme="W8A16", group_size=32))
    assert (tmp_path / "it-ran").exists()
    assert result.report.candidates[0].layers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./no-such-directory", "there is no such directory"),
        ("builtin:smelt-7m", "there is builtin:smelt-6m"),
        ("nobody/no-such-model", "fetching it from the hub failed"),
        ("what is this?", "neither a directory here nor a hub name"),
    ],
)
def test_names_that_lead_nowhere(name: str, expected: str, refused: Run) -> None:
    assert expected in refused(name)  # type: ignore[arg-type]


def test_a_file_is_not_a_model(refused: Run, tiny: Callable[..., Path]) -> None:
    assert "is a file" in refused(tiny() / "model.safetensors")


def test_a_quantized_model_is_not_quantized_again(
    recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    first = run(
        recipe(tiny(dtype=torch.bfloat16), {"output": str(tmp_path / "first"), "evaluate": False}, group_size=32)
    )
    with pytest.raises(SmeltError, match="already quantized"):
        run(recipe(first.checkpoint))


def test_a_missing_tokenizer(refused: Run, tiny: Callable[..., Path]) -> None:
    path = tiny()
    for file in path.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer cannot be loaded" in refused(path)


def test_a_tokenizer_of_another_model(refused: Run, tiny: Callable[..., Path]) -> None:
    assert "the tokenizer belongs to another model" in refused(tiny(vocab_size=300))


def test_a_model_whose_directory_is_a_symlink_works(
    recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tiny())
    assert run(recipe(tmp_path / "link", {"evaluate": False}, group_size=32)).checkpoint.exists()
    shutil.rmtree(tmp_path / "out")

"""Models that cannot be worked on: one clear sentence each, a non-zero exit, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.export.export import export
from smelt.models.directory.find import find_model
from smelt.runtime import Engine, SamplingParams

from ...commands import invoke, refusal
from ...tiny import make_model, save_model

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
    assert "header is invalid" in refused(path)


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
    assert "not a decoder-only language model" in refused(tmp_path / "t5")


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
        ("./no-such-directory", "directory not found"),
        ("builtin:smelt-7m", "available: builtin:smelt-6m"),
        ("nobody/no-such-model", "the download from the hub failed"),
        ("what is this?", "neither a local directory nor a hub name"),
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
    assert "has no tokenizer; add tokenizer.json" in refused(path)


def test_a_tokenizer_of_another_model(refused: Run, tiny: Callable[..., Path]) -> None:
    assert "the tokenizer belongs to another model" in refused(tiny(vocab_size=300))


def test_a_model_whose_directory_is_a_symlink_works(
    recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tiny())
    assert run(recipe(tmp_path / "link", {"evaluate": False}, group_size=32)).checkpoint.exists()
    shutil.rmtree(tmp_path / "out")


Damage = Callable[[Path], object]


def _rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = path / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _header(**fields: Any) -> Damage:
    return lambda path: _rewrite_header(path, lambda header: header["model.norm.weight"].update(fields))


def _nest(path: Path) -> None:
    text = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def _overlap(path: Path) -> None:
    _rewrite_header(path, lambda header: header.update({"model.extra": header["model.norm.weight"]}))


def _index(weight_map: Any) -> Damage:
    def write(path: Path) -> None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def _elsewhere(form: Callable[[Path], str]) -> Damage:
    """An index that names a file outside of the directory, where there is one."""

    def write(path: Path) -> None:
        names = load_file(path / "model.safetensors")
        outside = path.parent / "outside.safetensors"
        (path / "model.safetensors").rename(outside)
        _index(dict.fromkeys(names, form(outside)))(path)

    return write


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def write(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return write


def _fifo(name: str) -> Damage:
    def make(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return make


def _text(name: str, content: str) -> Damage:
    return lambda path: (path / name).write_text(content)


def _config(**changes: Any) -> Damage:
    return lambda path: _edit_config(path, **changes)


def _stored_groups(groups: Any) -> Damage:
    return _config(quantization_config={"quant_method": "compressed-tensors", "config_groups": groups})


# Damage that every command refuses, and a part of the sentence.
DAMAGES: dict[str, tuple[Damage, str]] = {
    "negative offset": (_header(data_offsets=[-4, 508]), "model.norm.weight has data_offsets"),
    "float shape": (_header(shape=[128.0]), "model.norm.weight has a shape"),
    "true as a shape": (_header(shape=[True]), "model.norm.weight has a shape"),
    "unknown dtype": (_header(dtype="F12"), "has the dtype 'F12'"),
    "dtype that is a list": (_header(dtype=["F32"]), "has the dtype ['F32']"),
    "deep header": (_nest, "nested too deeply"),
    "overlap": (_overlap, "share bytes"),
    "bytes of no tensor": (
        lambda path: (path / "model.safetensors").open("ab").write(b"more"),
        "4 bytes at its end belong to no tensor",
    ),
    "index is a list": (_index(["model.norm.weight"]), "weight_map"),
    "index of numbers": (_index({"model.norm.weight": 1}), "to 1, which is not"),
    "index to the parent": (_elsewhere(lambda file: f"../{file.name}"), "to '../outside.safetensors'"),
    "index to the root": (_elsewhere(str), "not a .safetensors file in this directory"),
    "weights are a FIFO": (_fifo("model.safetensors"), "is a FIFO"),
    "config is a FIFO": (_fifo("config.json"), "is a FIFO"),
    "tokenizer is a FIFO": (_fifo("tokenizer.json"), "is a FIFO"),
    "config is a list": (_text("config.json", "[]"), "holds a list, not a model configuration"),
    "a billion layers": (_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "no layers": (_config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "fewer layers": (_config(num_hidden_layers=2), "more layers or experts than config.json says"),
    "no heads": (_config(num_attention_heads=0), "num_attention_heads is 0"),
    "heads that do not divide": (_config(num_key_value_heads=3), "num_key_value_heads is 3, which does not divide"),
    "no positions": (_config(max_position_embeddings=0), "max_position_embeddings is 0"),
    "another width": (_config(intermediate_size=300), "mlp.gate_proj.weight: the checkpoint stores"),
    "another vocabulary": (_config(vocab_size=5000), "embed_tokens.weight: the checkpoint stores"),
    "unknown activation": (_config(hidden_act="nope"), "nope"),
    "unknown rope": (_config(rope_parameters={"rope_type": "nope", "rope_theta": 1e4}), "nope"),
    "negative theta": (_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rope_theta"),
    "an epsilon of infinity": (_config(rms_norm_eps=float("inf")), "rms_norm_eps is inf"),
    "quantization_config is a list": (_config(quantization_config=[1]), "quantization_config is [1]"),
    "groups are a list": (_stored_groups([1]), "config_groups is [1]"),
    "a group is nothing": (_stored_groups({"group_0": None}), "group 'group_0' is None"),
    "targets hold nothing": (_stored_groups({"group_0": {"targets": [None]}}), "has targets [None]"),
    "a target is no pattern": (_stored_groups({"group_0": {"targets": ["re:("]}}), "no regular expression"),
    "weights without bits": (_stored_groups({"group_0": {"weights": {"a": 1}}}), "weights with num_bits None"),
    "a group size of text": (
        _stored_groups({"group_0": {"weights": {"num_bits": 4, "group_size": "x"}}}),
        "weights with group_size 'x'",
    ),
    "architectures are numbers": (_config(architectures=[3]), "architectures is [3]"),
    "generation_config is a list": (_text("generation_config.json", "[]"), "generation_config.json: holds a list"),
    "an end token of text": (_text("generation_config.json", '{"eos_token_id": "end"}'), "eos_token_id is 'end'"),
    "integers": (
        _tensors(lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.ones(256, 128, dtype=torch.int64)})),
        "up_proj.weight: the checkpoint stores integers without a scale",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["dry-run", "inspect", "bench", "chat", "gguf", "eval"])
def test_every_command_refuses_alike(command: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    whole, others = tiny(), {}
    for name, (damage, sentence) in DAMAGES.items():
        path = tmp_path / name.replace(" ", "-") / "model"
        shutil.copytree(whole, path)
        damage(path)
        said = refusal(invoke(command, path, path.parent)).replace("\n", "")
        if sentence not in said:
            others[name] = said
    assert not others


@pytest.mark.parametrize("command", ["run", "bench", "chat", "gguf", "eval"])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_numbers_are_checked_by_every_command_that_reads_them(
    command: str, name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny()
    _tensors(lambda t: t[name].view(-1)[5].fill_(float("nan")))(path)
    assert f"{name} holds NaN or infinite weights" in refusal(invoke(command, path, tmp_path)).replace("\n", "")


@pytest.mark.few(2)
@pytest.mark.parametrize(("scheme", "part"), [("W4A16", "weight_scale"), ("FP8_DYNAMIC", "weight"), ("NVFP4", "weight_global_scale"), ("NVFP4", "weight_scale"), ("MXFP4", "weight_scale")])  # fmt: skip
def test_scales_and_codes_that_are_no_numbers(
    scheme: str, part: str, recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    made = run(recipe(tiny(dtype=torch.bfloat16), {"evaluate": False}, scheme=scheme, rounding="nearest")).checkpoint
    name = f"model.layers.0.mlp.up_proj.{part}"

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        bits = tensors[name].view(torch.uint8).view(-1)
        bits[: tensors[name].itemsize] = 0xFF  # of each of these types a NaN

    _tensors(poison)(made)
    for command in ("bench", "gguf"):
        assert f"{name} holds NaN" in refusal(invoke(command, made, tmp_path)).replace("\n", "")
    with pytest.raises(SmeltError, match="holds NaN"):
        export(str(made), "dense", tmp_path / "dense")


def test_layers_that_transformers_leaves_out_are_no_contradiction(tmp_path: Path) -> None:
    """GLM-4-MoE ships a layer more, which predicts a second token; transformers lists it, and is what knows."""
    from transformers import AutoModelForCausalLM, Glm4MoeConfig

    config = Glm4MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=46, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, n_routed_experts=2, num_experts_per_tok=1, vocab_size=64, first_k_dense_replace=46,
    )  # fmt: skip
    path = save_model(AutoModelForCausalLM.from_config(config), tmp_path / "glm")
    _tensors(lambda t: t.update({"model.layers.46.mlp.up_proj.weight": torch.ones(32, 32)}))(path)
    assert invoke("inspect", path, tmp_path).exit_code == 0
    _tensors(lambda t: t.update({"model.layers.47.mlp.up_proj.weight": torch.ones(32, 32)}))(path)
    assert "model.layers.47.mlp.up_proj.weight" in refusal(invoke("inspect", path, tmp_path))


def test_a_tokenizer_that_fails_at_the_first_text_is_refused_before(tiny: Callable[..., Path]) -> None:
    """transformers loads any ``model_max_length``, and compares it later."""
    path = tiny("llama")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": ""}))
    with pytest.raises(SmeltError, match=r"its tokenizer cannot be loaded .*'int' and 'str'"):
        find_model(str(path)).tokenizer()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(name: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny()
    (path / name).write_text('{"version": ')
    for command in ("dry-run", "chat", "gguf"):
        said = refusal(invoke(command, path, tmp_path)).replace("\n", "")
        assert name in said
        assert "is not valid JSON" in said
        assert "add tokenizer.json" not in said


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no such turn') }}",
        "{{ messages.nothing.at.all }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for",
        "{{ 1 // 0 }}",
        "{{ 'a' * 10 ** 15 }}",
    ],
)
def test_chat_templates_that_fail(template: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny()
    (path / "chat_template.jinja").write_text(template)
    done = invoke("chat", path, tmp_path)
    assert done.exit_code == 0, done.output  # the conversation may be begun anew
    assert "chat template fails on this conversation" in done.output
    assert "Traceback" not in done.output


def test_what_is_typed_need_not_be_utf_8(tiny: Callable[..., Path], tmp_path: Path) -> None:
    done = invoke("chat", tiny(), tmp_path, typed=b"caf\xe9\n/quit\n")
    assert done.exit_code == 0, done.output
    assert "prompt tokens, first token after" in done.output


@pytest.mark.parametrize("length", ["-4", "0", "1"])
def test_a_length_that_is_none(length: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    done = invoke("chat", tiny(), tmp_path, "--max-model-len", length)
    assert done.exit_code == 1
    assert f"max_model_len is {length}; it must be at least 2" in done.output
    with pytest.raises(SmeltError, match=f"max_model_len is {length}; it must be at least 2"):
        Engine(tiny(), max_model_len=int(length), quiet=True)


@pytest.mark.slow
def test_a_run_directory_stands_for_its_checkpoint(
    recipe: Callable[..., Recipe], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run(recipe(tiny(dtype=torch.bfloat16), {"evaluate": False}, group_size=32, rounding="nearest"))
    for command in ("inspect", "bench", "chat"):
        done = invoke(command, tmp_path / "out", tmp_path)
        assert done.exit_code == 0, done.output


def test_a_run_that_has_not_finished_is_not_another_name(refused: Run, tmp_path: Path) -> None:
    (tmp_path / "made" / "checkpoint.partial").mkdir(parents=True)
    sentence = refused(tmp_path / "made" / "checkpoint")
    assert "did you mean" not in sentence
    assert "has not finished" in sentence


def test_shards_that_are_links_into_a_cache(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    """As huggingface_hub keeps them."""
    path = _sharded(tmp_path)
    (tmp_path / "blobs").mkdir()
    for number, shard in enumerate(sorted(path.glob("*.safetensors"))):
        blob = shard.rename(tmp_path / "blobs" / str(number))
        shard.symlink_to(blob)
    assert run(recipe(path, {"evaluate": False}, group_size=32)).checkpoint.exists()


def test_a_window_of_zero_is_none_where_windows_are_not_used(tiny: Callable[..., Path]) -> None:
    """As transformers writes Qwen2-MoE's configuration."""
    path = tiny("qwen2", use_sliding_window=False)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"sliding_window": 0}))
    assert Engine(path, quiet=True, max_model_len=32).generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finished

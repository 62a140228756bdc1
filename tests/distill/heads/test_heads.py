"""Draft heads in training: what they compute, what of them is written, and that they resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file
from smelt.compress.cli import app
from smelt.distill.heads.head_files import write_head
from smelt.distill.heads.head_module import HeadModule, HeadShape
from smelt.distill.heads.head_objective import HeadLearner, StatesBetweenLayers
from smelt.distill.run.snapshots import Snapshots
from smelt.distill.run.student import WholeModel
from smelt.distill.run.text_writer import Writer
from smelt.distill.training.batches import TrainingBatch
from smelt.models.directory.directory import ModelDirectory
from smelt.models.structure.open_model import OpenModel
from smelt.quant.scheme import resolve
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.decoder.architectures import spec_of
from smelt.runtime.decoder.parts.rope import Rotations
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Phi3Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from typer.testing import CliRunner

from ...runtime.speculation.head_reference import ReferenceHead
from ...runtime.speculation.watched_head import WatchedHead
from ...tiny import SMELT_6M

PLACES = 4


def _module(head: ReferenceHead) -> HeadModule:
    """The same weights, as they are trained."""
    module = HeadModule(HeadShape(head.config, head.after, head.lm_head.out_features))
    stored = {name: each for name, each in head.state_dict().items() if name not in ("d2t", "t2d")}
    module.load_state_dict(stored)
    return module


@pytest.fixture
def head(tiny: Callable[..., Path]) -> ReferenceHead:
    """A head with random weights, for a part of the model's vocabulary."""
    return ReferenceHead(
        AutoModelForCausalLM.from_pretrained(tiny(num_hidden_layers=4)),
        3000,
        (1, 2, 3),
        norms_each=True,
        norms_outputs=True,
    ).eval()


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(vocab_size=64, hidden_size=64, num_attention_heads=4, num_hidden_layers=4, rotary_pct=0.25),
        Phi3Config(vocab_size=64, hidden_size=64, num_attention_heads=4, num_hidden_layers=4, partial_rotary_factor=0.75, pad_token_id=0),
        Qwen3Config(vocab_size=64, hidden_size=64, num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_hidden_layers=4),
    ],
    ids=["a quarter is rotated", "three quarters are rotated", "six heads of a pruned model"],
)  # fmt: skip
def test_a_head_is_rotated_as_it_was_trained(config: Any) -> None:
    shape = HeadShape.of(config, 4, 64)
    positions = torch.arange(9)
    cosines, sines = LlamaRotaryEmbedding(shape.config)(torch.ones(1), positions[None])
    ((ours, theirs),) = Rotations(spec_of(shape.config).ropes, torch.float32).of(positions, []).values()
    # Both halves of a head have the same.
    torch.testing.assert_close(torch.cat([ours, ours], -1)[:, 0], cosines[0])
    torch.testing.assert_close(torch.cat([theirs, theirs], -1)[:, 0], sines[0])
    assert cosines.shape[-1] == shape.config.head_dim == 16


def test_each_place_says_what_a_draft_would(tiny: Callable[..., Path], head: ReferenceHead) -> None:
    path = tiny(num_hidden_layers=4)
    text = torch.randint(1, 4096, (2, 20), generator=torch.Generator().manual_seed(1))
    model = WholeModel(OpenModel(ModelDirectory("", path)), torch.float32, torch.device("cpu"))
    states, logits = StatesBetweenLayers(model, head.after)(text)
    assert torch.allclose(logits, head.model[0](text).logits, atol=1e-4)
    module = _module(head)
    with torch.no_grad():
        places = module.unrolled(model.module.get_input_embeddings().weight[text], states, PLACES)
        found = [module.lm_head(normed) for normed in places]
    for window, first in ((0, 3), (1, 15), (1, 0)):
        for place in range(PLACES):
            # The model has computed all up to `first`, whose next token it has chosen; the draft goes on from there.
            tokens = text[window, : first + 2 + place].tolist()
            wanted = head.logits(tokens, first + 2)
            assert torch.allclose(found[place][window, first], wanted[head.t2d], atol=1e-4)


def test_the_loss_is_cross_entropy_with_the_models_probabilities(
    tiny: Callable[..., Path], head: ReferenceHead
) -> None:
    """And what is said of acceptance the overlap of both models' probabilities, where the draft's lacks some tokens."""
    text = torch.randint(1, 4096, (3, 16), generator=torch.Generator().manual_seed(2))
    model = WholeModel(OpenModel(ModelDirectory("", tiny(num_hidden_layers=4))), torch.float32, torch.device("cpu"))
    table, tokens = model.module.get_input_embeddings().weight, head.t2d.nonzero().flatten()
    read = StatesBetweenLayers(model, head.after)
    learner = HeadLearner(_module(head), read, table, tokens, 2, [TrainingBatch(text[:2]), TrainingBatch(text[2:])])
    losses, overlaps = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    theirs = head.model[0](text).logits.double().softmax(-1)
    count = 0
    for window in range(3):
        for first in range(text.shape[1] - 2):
            count += 1
            for place in range(2):
                mine = head.logits(text[window, : first + 2 + place].tolist(), first + 2).double().softmax(-1)
                wanted = theirs[window, first + 1 + place]
                losses[place] -= (wanted * mine.log())[head.t2d].sum()
                overlaps[place] += torch.minimum(mine, wanted).sum()
    held_out = learner.held_out()
    for place in range(2):
        assert held_out[f"place {place + 1}"] == pytest.approx(losses[place].item() / count, rel=1e-4)
        assert held_out[f"accepted {place + 1}"] == pytest.approx(overlaps[place].item() / count, rel=1e-3)
    loss, parts = learner.loss(TrainingBatch(text))
    assert float(loss) == pytest.approx((parts["place 1"] + 0.8 * parts["place 2"]) / 1.8, rel=1e-5)
    assert parts["place 1"] == pytest.approx(held_out["place 1"], rel=1e-4)


@pytest.mark.parametrize("scheme", [None, "W4A16", "W8A16", "NVFP4A16"])
def test_the_engine_reads_what_is_written(
    tiny: Callable[..., Path], head: ReferenceHead, tmp_path: Path, scheme: str | None
) -> None:
    made = None if scheme is None else resolve(scheme, 32 if scheme[0] == "W" else None)
    directory = tmp_path / "head"
    write_head(directory, _module(head), head.t2d.nonzero().flatten(), torch.float32, made)
    if scheme in ("W4A16", "W8A16"):  # compressed-tensors says what the codes are
        stored = load_file(directory / "model.safetensors")
        for name, parameter in head.named_parameters():
            local = name.removesuffix("weight")
            if f"{local}weight_packed" not in stored:
                assert "norm" in name
                continue
            codes = unpack_from_int32(stored[f"{local}weight_packed"], int(scheme[1]), parameter.shape)
            restored = codes.float().unflatten(1, (-1, 32)) * stored[f"{local}weight_scale"][..., None].float()
            assert (restored.flatten(1) - parameter).norm() < 0.15 * parameter.norm()
            parameter.data = restored.flatten(1)
    model = str(tiny(num_hidden_layers=4))
    options: dict[str, Any] = {"quiet": True, "max_model_len": 64, "kv_cache_memory_bytes": 1 << 22}
    prompts, greedy = [[1, 5, 9, 5], [7, 3]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with closing(Engine(model, **options)) as plain:
        answers = [each.outputs[0].token_ids for each in plain.generate(prompts, greedy)]
    with closing(Engine(model, drafter=str(directory), draft_tokens=3, **options)) as engine:
        watched = WatchedHead(engine, prompts, answers)
        assert [each.outputs[0].token_ids for each in engine.generate(prompts, greedy)] == answers
    if scheme != "NVFP4A16":
        assert watched.largest_error(head, every=1) < 1e-3


def _distilled(model: Path, output: Path, *more: str) -> Any:
    command = ["distill", str(model), "--for-drafting", "--head", "--output", str(output), "--tokens", "20k", *more]
    return CliRunner().invoke(app, command)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little of what a head gains."""
    monkeypatch.setattr(
        "smelt.compress.recipe.drafting.MEASURED",
        {
            "samples": 0,
            "windows": 2,
            "length": 32,
            "speed": {"prompt": 16, "generate": 8, "concurrency": [1], "repeats": 1},
        },
    )


def _interrupt_third(owner: type, method: str, patch: pytest.MonkeyPatch) -> None:
    """Interrupt after the third call."""
    original, calls = getattr(owner, method), list[int]()

    def called(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return found

    patch.setattr(owner, method, called)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_an_interrupted_training_ends_with_the_same_head(tmp_path: Path) -> None:
    model, outputs = tmp_path / "my-model", [tmp_path / "whole", tmp_path / "interrupted"]
    shutil.copytree(SMELT_6M, model)
    result = _distilled(model, outputs[0], "--scheme", "W4A16", "--draft-vocabulary", "1000")
    assert result.exit_code == 0, result.output
    for owner, method in ((Writer, "continued"), (Snapshots, "save")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("smelt.distill.training.trainer._SNAPSHOT_SECONDS", 0)
            patch.setattr("smelt.distill.training.trainer._SNAPSHOT_SHARE", 1e9)
            _interrupt_third(owner, method, patch)
            stopped = _distilled(model, outputs[1], "--scheme", "W4A16", "--draft-vocabulary", "1000")
        assert stopped.exit_code == 130, stopped.output
        assert sorted(path.name for path in outputs[1].iterdir() if path.suffix != ".csv") == ["journal"]
    assert _distilled(model, outputs[1], "--scheme", "W4A16", "--draft-vocabulary", "1000").exit_code == 0
    weights = [load_file(output / "checkpoint/model.safetensors") for output in outputs]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert weights[0]["d2t"].shape == (1000,)
    report = json.loads((outputs[0] / "report.json").read_text())
    assert report["status"] == "complete"
    (load,) = report["models"][0]["drafts"]["loads"]
    assert load["same_answers"] == load["requests"] == 1
    curve = json.loads((outputs[0] / "checkpoint/smelt.json").read_text())["draft_head"]["training"]["curve"]
    assert curve[-1]["held_out"]["place 1"] < curve[0]["held_out"]["place 1"] - 0.5
    card = (outputs[0] / "checkpoint/README.md").read_text()
    assert "# my-model, draft head" in card
    assert str(tmp_path) not in card
    again = _distilled(model, outputs[0], "--scheme", "W4A16", "--draft-vocabulary", "1000")
    assert again.exit_code == 0
    other = _distilled(model, outputs[0], "--scheme", "W8A16", "--draft-vocabulary", "1000")
    assert other.exit_code == 1
    assert "holds another run (scheme: 'W4A16' -> 'W8A16')" in other.output
    verified = CliRunner().invoke(app, ["verify", str(outputs[0] / "checkpoint")])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--blocks", "3"], "leave --blocks and --processes out"),
        (["--processes", "2"], "leave --blocks and --processes out"),
        (["--scheme", "FP8"], "measured beforehand"),
        (["--scheme", "W9"], "unknown scheme 'W9'"),
        (["--tokens", "many"], "'many' is not a number of tokens"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--device", "tpu"], "device is 'tpu'"),
    ],
)
def test_mistakes_get_a_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    result = _distilled(Path("builtin:smelt-6m"), tmp_path / "out", *arguments)
    assert result.exit_code == 1
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


def test_a_draft_vocabulary_is_a_heads(tmp_path: Path) -> None:
    command = [
        "distill",
        "builtin:smelt-6m",
        "--for-drafting",
        "--draft-vocabulary",
        "9",
        "--output",
        str(tmp_path / "o"),
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "give it with --head" in result.output

"""A draft head drafts what EAGLE-3's arithmetic says, of the model's own states, and the output stays the model's own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.speculation.eagle.head_checkpoint import HeadCheckpoint
from smelt.system.errors import SmeltError
from torch import Tensor
from transformers import AutoModelForCausalLM

from .head_reference import ReferenceHead
from .watched_head import WatchedHead

PROMPTS = [[1, 5, 9, 5, 9, 5, 9], [3, 4], [11], [8, 1, 2, 8, 1, 2, 8, 1], list(range(60, 5, -1))]
ENGINE: dict[str, Any] = {"quiet": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "block_size": 16}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.95, repetition_penalty=1.1, ignore_eos=True)


@pytest.fixture
def made(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, ReferenceHead, Path]]:
    """A model, a head for it, and the head's directory."""

    def make(
        architecture: str = "llama", dtype: torch.dtype = torch.float32, **options: Any
    ) -> tuple[Path, ReferenceHead, Path]:
        model = tiny(architecture, dtype, num_hidden_layers=4)
        saving = {name: options.pop(name) for name in ("speculators",) if name in options}
        head = ReferenceHead(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), **options).eval()
        return model, head, head.save(tmp_path / "head", dtype, **saving)

    return make


def tokens(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Of each prompt's completion."""
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params)]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norms_first": True, "speculators": True, "vocabulary": 4090},
        {"after": (0, 2, 4), "vocabulary": 4095, "speculators": True},
        {"after": (1, 1, 3), "speculators": True},
        {"norms_each": True, "norms_outputs": True},
        {"norms_all": True, "norms_outputs": True, "speculators": True},
    ],
    ids=[
        "EAGLE-3's layout",
        "speculators' layout",
        "first and last states",
        "states twice",
        "EAGLE-3.1",
        "norm before fc",
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_logits_are_the_references_and_tokens_the_models(
    made: Callable[..., tuple[Path, ReferenceHead, Path]], architecture: str, options: dict[str, Any]
) -> None:
    model, head, directory = made(architecture, **options)
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = tokens(plain, GREEDY)
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=4, **ENGINE)) as engine:
        watched = WatchedHead(engine, PROMPTS, answers)
        assert tokens(engine, GREEDY) == answers
        total = engine.drafting.total  # type: ignore[union-attr]
        assert 0 < sum(total.accepted) < sum(total.drafted)
    assert watched.largest_error(head) < 1e-4


def test_the_compiled_kernels_compute_the_same(made: Callable[..., tuple[Path, ReferenceHead, Path]]) -> None:
    """In bfloat16, so that they are near; three positions of four are drafted from the head's own states."""
    model, head, directory = made(dtype=torch.bfloat16)
    answers = tokens(engine := Engine(str(model), **ENGINE), GREEDY)
    engine.close()
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=4, **ENGINE)) as engine:
        watched = WatchedHead(engine, PROMPTS, answers)
        assert tokens(engine, GREEDY) == answers
    for seen, known, found in watched.seen[::9]:
        wanted = head.logits(seen, known)
        assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_greedy_and_sampled_requests_are_drafted_together(
    made: Callable[..., tuple[Path, ReferenceHead, Path]],
) -> None:
    """Greedy ones among the head's own tokens, of which it has fewer than the model, others among the model's."""
    model, _, directory = made(dtype=torch.bfloat16, vocabulary=60)
    for params in ([GREEDY, SAMPLED], [SAMPLED, GREEDY]):
        each = [params[i % 2] for i in range(len(PROMPTS))]
        with (
            closing(Engine(str(model), **ENGINE)) as alone,
            closing(Engine(str(model), drafter=str(directory), **ENGINE)) as engine,
        ):
            expected = [output.outputs[0].token_ids for output in alone.generate(PROMPTS, each)]
            assert [output.outputs[0].token_ids for output in engine.generate(PROMPTS, each)] == expected


OPTIONS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 5},
    {"block_size": 4, "blocks": 40, "admission": "immediate"},
    {"policy": "mlfq", "max_num_seqs": 2},
    {"enable_prefix_caching": False, "draft_branches": 2},
    {"block_size": 4, "draft_branches": 3},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_features_follow_their_tokens(
    made: Callable[..., tuple[Path, ReferenceHead, Path]], options: dict[str, Any]
) -> None:
    """Whatever becomes of the cache's blocks; the second time prompts are there already."""
    model, head, directory = made()
    given = {**ENGINE, **options}
    blocks = given.pop("blocks", None)
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = tokens(plain, SAMPLED)
    if blocks:
        probe = Engine(str(model), drafter=str(directory), **given)
        given["kv_cache_memory_bytes"] = probe.reservation.cache // probe.reservation.blocks * blocks
        probe.close()
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=4, **given)) as engine:
        watched = WatchedHead(engine, PROMPTS, answers)
        for _ in range(2):
            assert tokens(engine, SAMPLED) == answers
        assert (engine.scheduler.preemptions > 0) == (blocks is not None)
        total = engine.drafting.total  # type: ignore[union-attr]
        assert sum(total.accepted) > 0
        engine.cache.check([])
    branches = "draft_branches" in options
    assert watched.largest_error(head, every=3 if branches else 7) < 1e-4
    assert (watched.on_branches > 20) == branches
    assert (total.on_branch > total.caught) == branches  # more than one token of some


def test_states_wait_while_nothing_is_drafted(made: Callable[..., tuple[Path, ReferenceHead, Path]]) -> None:
    """Those of several steps are fused together, also of blocks that have been another sequence's since."""
    model, head, directory = made()
    given = ENGINE | {"block_size": 4, "admission": "immediate", "draft_tokens": 3}
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = tokens(plain, SAMPLED)
    probe = Engine(str(model), drafter=str(directory), **given)
    given["kv_cache_memory_bytes"] = probe.reservation.cache // probe.reservation.blocks * 40
    probe.close()
    with closing(Engine(str(model), drafter=str(directory), **given)) as engine:
        watched, drafting = WatchedHead(engine, PROMPTS, answers), engine.drafting
        for _ in range(2):
            names, done = [engine.add_request(prompt, SAMPLED) for prompt in PROMPTS], dict[str, list[int]]()
            for step in itertools.count():
                engine.core.drafting = engine.scheduler.drafting = drafting if step % 7 > 4 else None
                ended = [output for output in engine.step() if output.finished]
                done |= {output.request_id: output.outputs[0].token_ids for output in ended}
                if len(done) == len(names):
                    break
            assert [done[name] for name in names] == answers
        assert engine.scheduler.preemptions > 0
    assert len(watched.seen) > 20
    assert watched.largest_error(head, every=3) < 1e-4


@pytest.mark.slow
def test_blocks_that_return_from_host_memory_have_their_features(
    made: Callable[..., tuple[Path, ReferenceHead, Path]],
) -> None:
    model, head, directory = made()
    given = ENGINE | {"block_size": 4, "admission": "immediate", "host_cache_bytes": 1 << 20, "swap": "swap"}
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = tokens(plain, SAMPLED)
    probe = Engine(str(model), drafter=str(directory), **given)
    given["kv_cache_memory_bytes"] = probe.reservation.cache // probe.reservation.blocks * 34
    probe.close()
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=3, **given)) as engine:
        watched, swapped = WatchedHead(engine, PROMPTS, answers), list[int]()
        engine.core.on_step = lambda plan: swapped.extend(block for _, block in plan.swap_in)
        for _ in range(2):
            assert tokens(engine, SAMPLED) == answers
        assert swapped
    assert watched.largest_error(head, every=3) < 1e-4


def test_prompts_that_are_only_embedded_leave_nothing(
    made: Callable[..., tuple[Path, ReferenceHead, Path]],
) -> None:
    """Their states are of blocks of another cache, which may be larger."""
    model, head, directory = made()
    with closing(Engine(str(model), **ENGINE)) as plain:
        answers = tokens(plain, GREEDY)
    with closing(Engine(str(model), drafter=str(directory), draft_tokens=3, **ENGINE)) as engine:
        watched = WatchedHead(engine, PROMPTS, answers)
        names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        done: dict[str, list[int]] = {}
        while len(done) < len(names):
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0].token_ids
            engine.hidden_states([list(range(1, 100))] * 5)
        assert [done[name] for name in names] == answers
    assert watched.largest_error(head, every=3) < 1e-4


@pytest.mark.parametrize(
    ("fields", "layers", "after"),
    [
        # As heads for SGLang have it, which adds one; as EAGLE-3's authors leave it out; and as vLLM takes it.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}, 94, (2, 47, 91)),
        ({}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, 36, (2, 18, 33)),
        ({"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []}}, 32, (2, 16, 29)),
    ],
    ids=["numbered by what leaves them", "not numbered", "numbered by what reads them", "an empty list"],
)
def test_which_states_are_read(
    made: Callable[..., tuple[Path, ReferenceHead, Path]], fields: dict[str, Any], layers: int, after: tuple[int, ...]
) -> None:
    _, _, directory = made()
    path = directory / "config.json"
    data = json.loads(path.read_text())
    del data["eagle_config"]
    path.write_text(json.dumps(data | fields))
    assert HeadCheckpoint(directory).settings.layers(layers) == after


def _changed(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _retensored(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    found = load_file(directory / "model.safetensors")
    change(found)
    save_file(found, directory / "model.safetensors")


def _smaller(directory: Path) -> Path:
    _changed(directory, draft_vocab_size=4000)
    _retensored(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:4000].contiguous()}))
    return directory


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "another kind": (
        lambda d: _changed(d, speculators_model_type="mlp"),
        "of the kind mlp; draft heads must be eagle3",
    ),
    "EAGLE": (lambda d: _changed(d, eagle_config={"use_aux_hidden_state": False}), "as EAGLE and EAGLE-2 do"),
    "scaled logits": (lambda d: _changed(d, logit_scale=0.5), "logit_scale is 0.5"),
    "a norm that its config does not name": (
        lambda d: _retensored(d, lambda t: t.update({"fc_norm.0.weight": torch.ones(128)})),
        "has fc_norm.0.weight, but fc_norm is not set",
    ),
    "a short norm": (
        lambda d: _retensored(d, lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(3)})),
        "midlayer.hidden_norm.weight has the shape [3], and must have [128]",
    ),
    "a scale for a norm": (
        lambda d: (
            _changed(d, fc_norm=True),
            _retensored(
                d, lambda t: t.update({f"fc_norm.{i}.weight": torch.ones([128] if i else []) for i in range(3)})
            ),
        ),
        "fc_norm.0.weight has the shape [], and must have [128]",
    ),
    "long rows of its feed-forward part": (
        lambda d: _retensored(d, lambda t: t.update({"midlayer.mlp.down_proj.weight": torch.ones(128, 8192)})),
        "midlayer.mlp.down_proj has the shape [128, 8192], and must have [128, ",
    ),
    "too many rows of it": (
        lambda d: _retensored(
            d,
            lambda t: t.update(
                {"midlayer.mlp.down_proj.weight": torch.ones(256, t["midlayer.mlp.up_proj.weight"].shape[0])}
            ),
        ),
        "midlayer.mlp.down_proj has the shape [256, ",
    ),
    "a short bias": (
        lambda d: _retensored(d, lambda t: t.update({"fc.bias": torch.ones(1)})),
        "fc.bias has the shape [1], and its weight 128 outputs",
    ),
    "rotations that it does not know": (
        lambda d: _changed(d, rope_parameters={"rope_type": "mrope", "rope_theta": 10000.0}),
        "rope_type is 'mrope', which is not one of",
    ),
    "an activation that it does not know": (lambda d: _changed(d, hidden_act="nonsense"), "hidden_act is 'nonsense'"),
    "a norm that it lacks": (lambda d: _changed(d, norm_before_fc=True), "lacks input_norm.weight"),
    "two layers": (lambda d: _changed(d, num_hidden_layers=2), "it has 2 layers"),
    "layers of a larger model": (
        lambda d: _changed(d, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}),
        "after 3, 17, 30 layers, and the model has 4",
    ),
    "no numbers": (
        lambda d: _changed(d, eagle_config={"eagle_aux_hidden_state_layer_ids": ["x"]}),
        "must list 3 layers",
    ),
    "a vocabulary without its tokens": (
        lambda d: _retensored(_smaller(d), lambda t: t.pop("d2t")),
        "a vocabulary of 4000 tokens without d2t, and the model of 4096",
    ),
    "embeddings of fewer tokens": (
        lambda d: _retensored(d, lambda t: t.update({"embed_tokens.weight": torch.ones(4000, 128)})),
        "its embeddings are of 4000 tokens, and the model has 4096",
    ),
    "another width": (lambda d: _changed(d, hidden_size=64, head_dim=16), "fc has the shape"),
    "no vocabulary": (lambda d: _changed(d, draft_vocab_size=-1), "must be a number of tokens"),
    "a norm that it does not know": (
        lambda d: _retensored(d, lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)})),
        "q_norm.weight, which draft heads of EAGLE-3 do not have",
    ),
    "no layer": (lambda d: _retensored(d, lambda t: t.pop("midlayer.mlp.up_proj.weight")), "mlp.up_proj"),
    "tokens that are not there": (
        lambda d: _retensored(d, lambda t: t.update(d2t=torch.full_like(t["d2t"], 5000))),
        "d2t does not give each",
    ),
    "tokens twice": (lambda d: _retensored(d, lambda t: t.update(d2t=-torch.arange(4096))), "d2t does not give each"),
    "weights that are not numbers": (
        lambda d: _retensored(d, lambda t: t["fc.weight"].fill_(float("nan"))),
        "fc.weight holds NaN",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no safetensors"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_heads_are_refused(made: Callable[..., tuple[Path, ReferenceHead, Path]], damage: str) -> None:
    model, _, directory = made()
    change, sentence = DAMAGE[damage]
    change(directory)
    with pytest.raises(SmeltError) as raised:
        Engine(str(model), drafter=str(directory), **ENGINE)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_what_a_head_cannot_be_beside(made: Callable[..., tuple[Path, ReferenceHead, Path]]) -> None:
    model, _, directory = made()
    with pytest.raises(SmeltError, match="leave compile out"):
        Engine(str(model), drafter=str(directory), compile=True, **ENGINE)
    with pytest.raises(SmeltError, match="draft head, which is no model"):
        Engine(str(directory), **ENGINE)

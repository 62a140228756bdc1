"""Drafts on a GPU, in Triton's interpreter or on one: verified in the step that samples, with the tokens of an engine without a drafter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.engine.executors import draft_lengths, gpu_executor
from smelt.runtime.engine.executors.gpu_executor import GpuExecutor
from smelt.runtime.engine.setup import loading
from smelt.runtime.gpu import GpuOperators
from smelt.runtime.gpu.sampled_steps import SampledSteps
from smelt.runtime.gpu.step_kinds import StepKind
from smelt.runtime.requests.output import RequestOutput
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.speculation.caches import OwnCache
from smelt.runtime.speculation.drafter import DraftedChain, PlannedChain
from smelt.runtime.speculation.eagle.head_drafter import HeadDrafter
from smelt.runtime.speculation.stepwise import GrowingDraft
from smelt.runtime.speculation.times_by_rows import TimesByRows
from smelt.runtime.speculation.verification import VerifiedChain
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..kernels.interpreter import DEVICE
from ..speculation.head_reference import ReferenceHead
from ..speculation.pretend import pretend, pretend_lookup
from ..speculation.watched_head import WatchedHead

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PROMPTS = [[1, 5, 9, 5, 9], [3, 4, 3, 4, 7, 7, 2], [11], list(range(40, 20, -1))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "quiet": True,
}
PARAMS = [
    SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True),
    SamplingParams(
        max_tokens=8, seed=3, temperature=1.5, repetition_penalty=1.5, presence_penalty=0.5, ignore_eos=True
    ),
    SamplingParams(max_tokens=8, seed=4, top_p=0.9, top_k=50, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=8, seed=5, min_tokens=6, stop_token_ids=tuple(range(0, 256, 8)), logit_bias={7: 2.0}),
]


@pytest.fixture
def engine_of(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on the GPU's kernels."""
    path = tiny("llama", num_hidden_layers=1, vocab_size=256)

    def build(**options: Any) -> Engine:
        with monkeypatch.context() as patch:
            if DEVICE.type == "cpu":
                patch.setattr(loading, "_operators", lambda dtype, *_, **__: GpuOperators(dtype, DEVICE))
            if "drafter" in options:
                options["drafter"] = options["drafter"].replace("itself", str(path))
            engine = Engine(path, device=DEVICE.type, **OPTIONS, **options)
        assert isinstance(engine.executor, GpuExecutor)
        return engine

    return build


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason == theirs.finish_reason
            assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
            for these, those in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert these == pytest.approx(those, abs=1e-3)


def change(checkpoint: Path, name: str, by: Callable[[Tensor], Tensor]) -> None:
    """Another value of one of a checkpoint's tensors."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = by(tensors[name])
    save_file(tensors, file, metadata={"format": "pt"})


def on_the_host(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an item for each step whose tokens are chosen on the host."""
    found: list[int] = []
    executor: Any = engine.executor
    compute = executor._compute
    monkeypatch.setattr(executor, "_compute", lambda plan: found.append(1) or compute(plan))
    return found


@pytest.mark.slow
def test_drafts_are_verified_where_tokens_are_sampled(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine_of().generate(PROMPTS, PARAMS)
    engine = engine_of(drafter="lookup", draft_tokens=3)
    pretend(engine, expected)
    host = on_the_host(engine, monkeypatch)
    assert_same(engine.generate(PROMPTS, PARAMS), expected)
    assert engine.drafting is not None
    assert 0.1 < (engine.drafting.total.acceptance or 0) < 0.9
    assert not host
    assert engine.cache.free == engine.cache.blocks


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens_beside_several_samples(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are chosen on the host, and others of the same step then, too."""
    params = [*PARAMS[1:3], SamplingParams(max_tokens=4, seed=6, n=2), *PARAMS[1:2]]
    expected = engine_of().generate(PROMPTS, params)
    engine = engine_of(drafter="lookup", draft_tokens=2)
    pretend(engine, expected)
    host = on_the_host(engine, monkeypatch)
    assert_same(engine.generate(PROMPTS, params), expected)
    assert host


@pytest.mark.slow
def test_trees_are_verified_on_the_host(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = engine_of().generate(PROMPTS[:3], PARAMS[:3])
    engine = engine_of(drafter="lookup", draft_tokens=2, draft_branches=2)
    pretend(engine, expected)
    host = on_the_host(engine, monkeypatch)
    assert_same(engine.generate(PROMPTS[:3], PARAMS[:3]), expected)
    assert host
    assert engine.drafting is not None
    assert engine.drafting.total.on_branch > 0


@pytest.mark.slow
def test_steps_that_are_too_long_are_computed_without_drafts(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with prompts; they would need more rows of logits, and kinds of steps, than there are."""
    monkeypatch.setattr(gpu_executor, "_VERIFIED", 8)
    expected = engine_of().generate(PROMPTS[:3], PARAMS[:3])
    engine = engine_of(drafter="lookup", draft_tokens=3)
    assert engine.executor._logits.shape[0] == 8  # type: ignore[attr-defined]
    pretend(engine, expected)
    assert_same(engine.generate(PROMPTS[:3], PARAMS[:3]), expected)
    assert engine.drafting is not None
    assert engine.drafting.total.verified > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft_tokens", [3, "auto"])
def test_what_is_looked_up_stands_beside_what_a_model_drafts(
    engine_of: Callable[..., Engine], draft_tokens: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step for some sequences, and for one sequence in turn."""
    expected = engine_of().generate(PROMPTS[:3], PARAMS[:3])
    engine = engine_of(drafter="lookup+itself", draft_tokens=draft_tokens)
    pretend_lookup(engine, expected)
    host = on_the_host(engine, monkeypatch)
    assert_same(engine.generate(PROMPTS[:3], PARAMS[:3]), expected)
    assert not host
    assert engine.drafting is not None
    total = engine.drafting.total
    if draft_tokens != "auto":
        assert 0 < total.looked_up < total.all_drafted
        assert total.looked_up_right < total.looked_up
        assert total.all_accepted - total.looked_up_right == total.all_drafted - total.looked_up


@pytest.mark.slow
def test_a_model_drafts_with_the_noise_of_the_device(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(drafter="itself", draft_tokens=3)
    assert_same(engine.generate(PROMPTS[:3], PARAMS[:3]), engine_of().generate(PROMPTS[:3], PARAMS[:3]))
    assert engine.drafting is not None
    assert (engine.drafting.total.agreement or 0) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("own_cache", [True, False])
def test_a_models_drafts_are_chosen_on_the_device(
    engine_of: Callable[..., Engine], tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, own_cache: bool
) -> None:
    """The same ones as on the host, where most are wrong, too."""
    other = tiny("llama", num_hidden_layers=2 if own_cache else 1, vocab_size=256)
    change(other, "model.norm.weight", lambda norm: norm + torch.randn(norm.shape))
    expected = engine_of().generate(PROMPTS[1:3], PARAMS[:2])
    counts = []
    for on_device in (True, False):
        engine = engine_of(drafter=str(other), draft_tokens=3)
        executor: Any = engine.executor
        drafter: Any = engine.drafter
        assert isinstance(drafter._cache, OwnCache) == own_cache
        if not on_device:
            executor._chained = None
        chosen: list[int] = []
        choose = drafter._next
        monkeypatch.setattr(drafter, "_next", lambda drafts, to=chosen, choose=choose: to.append(1) or choose(drafts))
        assert_same(engine.generate(PROMPTS[1:3], PARAMS[:2]), expected)
        assert bool(chosen) == (not on_device)
        assert engine.drafting is not None
        counts.append((engine.drafting.total.drafted, engine.drafting.total.accepted))
        assert engine.cache.free == engine.cache.blocks
    assert counts[0] == counts[1]
    assert 0 < sum(counts[0][1]) < sum(counts[0][0])


@pytest.mark.slow
def test_a_drafter_without_finite_logits_drafts_nothing(
    engine_of: Callable[..., Engine], tiny: Callable[..., Path]
) -> None:
    expected = engine_of().generate(PROMPTS[:2], PARAMS[:2])
    broken = tiny("llama", num_hidden_layers=2, vocab_size=256)
    change(broken, "model.norm.weight", lambda norm: norm * 0 + 3e38)
    engine = engine_of(drafter=str(broken), draft_tokens=3)
    assert_same(engine.generate(PROMPTS[:2], PARAMS[:2]), expected)
    assert engine.drafting is not None
    assert sum(engine.drafting.total.drafted) == 0


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="there graphs are captured of all kinds of steps before any is timed")
def test_steps_are_timed_as_they_will_run(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, StepKind]] = []
    body = SampledSteps.body
    monkeypatch.setattr(SampledSteps, "body", lambda self, kind: seen.append((self, kind)) or body(self, kind))
    monkeypatch.setattr(draft_lengths, "_MEASURING_SECONDS", 1000.0)
    monkeypatch.setattr(draft_lengths, "_ROWS", (1, 3, 24, 48))
    engine = engine_of(drafter="itself", draft_tokens="auto")
    executor: Any = engine.executor
    kinds = {id(steps): [kind for one, kind in seen if one is steps] for steps in {one for one, _ in seen}}
    of_model, of_drafter = kinds[id(executor._steps)], kinds[id(executor._chained.later)]
    assert {kind.tokens for kind in of_model if kind.drafts} == {4, 32}
    assert {kind.tokens for kind in of_drafter} == {1, 4}
    assert set(of_model) <= set(executor._kinds.all())
    expected = engine_of().generate(PROMPTS[:2], PARAMS[:2])
    assert_same(engine.generate(PROMPTS[:2], PARAMS[:2]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("branches", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_draft_head_reads_what_the_models_steps_leave(
    engine_of: Callable[..., Engine],
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    branches: int,
) -> None:
    """Whether drafts are verified on the device, or on the host."""
    model = AutoModelForCausalLM.from_pretrained(tiny("llama", num_hidden_layers=1, vocab_size=256))
    head = ReferenceHead(model, vocabulary=250, after=(0, 1, 1), norms_all=True).eval()
    expected = engine_of().generate(PROMPTS[:3], PARAMS[:3])
    directory = head.save(tmp_path / "head", speculators=True)
    engine = engine_of(drafter=str(directory), draft_tokens=3, draft_branches=branches)
    host = on_the_host(engine, monkeypatch)
    engine.executor._chained = None  # type: ignore[attr-defined]  # drafts are chosen where they are watched
    watched = WatchedHead(engine, PROMPTS[:3], [each.outputs[0].token_ids for each in expected])
    assert_same(engine.generate(PROMPTS[:3], PARAMS[:3]), expected)
    assert engine.drafting is not None
    assert sum(engine.drafting.total.accepted) > 0
    assert bool(host) == bool(branches)
    assert watched.largest_error(head, every=2) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("most", [288, pytest.param(8, marks=pytest.mark.slow)])
def test_a_draft_heads_tokens_are_chosen_on_the_device(
    engine_of: Callable[..., Engine],
    tiny: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """The same ones as on the host, in steps of up to so many tokens; drafts are made right but for every third token of an answer."""
    monkeypatch.setattr(gpu_executor, "_VERIFIED", most)
    model = AutoModelForCausalLM.from_pretrained(tiny("llama", num_hidden_layers=1, vocab_size=256))
    head = ReferenceHead(model, vocabulary=250, after=(0, 1, 1), norms_each=True, norms_outputs=True)
    head = head.eval().save(tmp_path / "head", speculators=True)
    expected = engine_of().generate(PROMPTS, PARAMS)
    answers = {tuple(each.prompt_token_ids): each.outputs[0].token_ids for each in expected}
    engine = engine_of(drafter=str(head), draft_tokens=3)
    host = on_the_host(engine, monkeypatch)
    drafter, chained = engine.drafter, engine.executor._chained  # type: ignore[attr-defined]
    assert isinstance(drafter, HeadDrafter)
    monkeypatch.setattr(draft_lengths, "_measured", lambda *_: TimesByRows())
    adapting = draft_lengths.drafting_of(replace(engine.config, draft_tokens="auto"), drafter, engine.executor)
    assert not adapting._ends_by_odds  # type: ignore[attr-defined]
    compute, counts = chained.of, set()

    def both(planned: dict[Sequence, PlannedChain], *others: Any) -> dict[Sequence, DraftedChain]:
        found = compute(planned, *others)
        drafter._states.clear()
        growing = {sequence: GrowingDraft(sequence, each.longest) for sequence, each in planned.items()}
        drafter._grow(growing)
        right = {}
        for sequence, draft in growing.items():
            assert draft.chain == found[sequence].tokens[: len(draft.chain)]
            assert len(draft.chain) == planned[sequence].longest or drafter._is_over(sequence, draft.chain[-1])
            counts.add(planned[sequence].stop - planned[sequence].start)
            answer = answers[tuple(sequence.request.prompt)][len(sequence.generated) :]
            chain = [token if len(answer[i:]) % 3 else token ^ 1 for i, token in enumerate(answer[: len(draft.chain)])]
            right[sequence] = DraftedChain(chain, len(chain))
        return right

    monkeypatch.setattr(chained, "of", both)
    assert_same(engine.generate(PROMPTS, PARAMS), expected)
    assert not host
    assert 1 in counts
    assert max(counts) > 1
    assert engine.drafting is not None
    assert sum(engine.drafting.total.accepted) > 0


@pytest.mark.slow
def test_drafts_in_a_cache_that_is_too_small(engine_of: Callable[..., Engine]) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = [prompt[:12] for prompt in (PROMPTS[3], PROMPTS[1], PROMPTS[0])]
    expected = engine_of().generate(prompts, params)
    engine = engine_of(drafter="lookup", draft_tokens=3)
    engine.cache._empty = engine.cache._empty[engine.reservation.blocks - 5 :]
    engine.cache.blocks = 5
    pretend(engine, expected)
    assert_same(engine.generate(prompts, params), expected)
    assert engine.scheduler.preemptions > 0


def test_each_step_with_drafts_has_a_kind(engine_of: Callable[..., Engine]) -> None:
    executor: Any = engine_of(drafter="lookup", draft_tokens=3).executor
    kinds = set(executor._kinds.all())
    for counts in itertools.product([1, 2, 4], repeat=3):
        if sum(counts) > 3:
            kind = executor._kinds.of(list(counts), drafts=True)
            assert kind in kinds
            assert kind.wanted == kind.tokens >= sum(counts)
            assert kind.singles == (1 in counts)
    assert {kind for kind in kinds if not kind.drafts} == set(engine_of().executor._kinds.all())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("chain", "chosen", "sound", "count", "accepted", "is_wrong"),
    [
        ([], [5], [1], 1, 0, False),
        ([5, 6], [5, 6, 7], [1, 1, 1], 3, 2, False),
        ([5, 6], [5, 9, 7], [1, 1, 1], 2, 1, True),
        ([5, 6], [4, 6, 7], [1, 1, 1], 1, 0, True),
        ([5, 6], [5, 6, 0], [1, 1, 0], 2, 2, False),
        ([5, 6], [5, 0, 7], [1, 0, 1], 1, 1, False),
    ],
)
def test_what_a_chain_leads_to(
    chain: list[int], chosen: list[int], sound: list[int], count: int, accepted: int, is_wrong: bool
) -> None:
    found = VerifiedChain.of(chain, chosen, sound)
    assert (found.count, found.outcome.drafted, found.outcome.accepted) == (count, len(chain), accepted)
    assert found.outcome.is_chain_wrong == is_wrong

"""With a drafter the engine's output is what it is without one, whatever is drafted and whatever is asked for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.measure.bench import undrafted
from smelt.runtime.requests.constraint import Matcher
from smelt.system.errors import RuntimeProblem, SmeltError
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...tiny import SMELT_6M, make_model, save_model
from .head_reference import ReferenceHead

PROMPTS = [
    [1, 5, 9, 5, 9, 5, 9],
    [3, 4, 3, 4, 7, 7, 7, 2, 3, 4],
    [11],
    [8, 1, 2, 8, 1, 2, 8, 1],
    list(range(40, 5, -1)),
]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
ENGINE: dict[str, Any] = {"quiet": True, "max_model_len": 96, "kv_cache_memory_bytes": 1 << 22}


def perturbed(model: Any, share: float) -> Any:
    """A model with noise in all its weights."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share * parameter.std(unbiased=False) * torch.randn_like(parameter))
    return model


@pytest.fixture
def drafters(tiny: Callable[..., Path], tmp_path: Path) -> dict[str, str]:
    """A drafter that is nearly always right, one that is right now and then, one of other shapes, lookup, and both."""
    model = tiny("llama")
    near = perturbed(AutoModelForCausalLM.from_pretrained(model), 0.02)
    narrow = make_model("llama", torch.float32, num_hidden_layers=1)
    return {
        "itself": str(model),
        "near": str(save_model(near, tmp_path / "near")),
        "shallow": str(save_model(narrow, tmp_path / "shallow")),
        "lookup": "lookup",
        "both": f"lookup+{tmp_path / 'shallow'}",
        "first layers": "early-exit:2",
        "head": str(
            ReferenceHead(AutoModelForCausalLM.from_pretrained(model), vocabulary=4000).save(tmp_path / "head")
        ),
    }


def tokens(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    """Of all completions of all prompts."""
    return [[each.token_ids for each in output.outputs] for output in engine.generate(prompts, params)]


@pytest.mark.few(4)
@pytest.mark.parametrize("drafter", ["itself", "near", "shallow", "lookup", "both", "first layers"])
@pytest.mark.parametrize("draft_tokens", [1, 4, "auto"])
def test_greedy_tokens_are_transformers_own(drafters: dict[str, str], drafter: str, draft_tokens: int | str) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafters["itself"])
    engine = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=draft_tokens, **ENGINE)
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        inputs = torch.tensor([prompt])
        expected = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.0,
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    if drafter == "itself" and draft_tokens != "auto":
        assert all(output.accepted_tokens == output.draft_tokens > 0 for output in outputs)


CASES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=24, seed=7, ignore_eos=True),
    "narrowed": SamplingParams(max_tokens=24, seed=7, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        max_tokens=24, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, ignore_eos=True
    ),
    "greedy with penalties": SamplingParams(max_tokens=24, temperature=0, repetition_penalty=1.5, logit_bias={3: 2.0}),
    "min_tokens": SamplingParams(max_tokens=24, seed=1, min_tokens=10),
    "stop token": SamplingParams(max_tokens=24, temperature=0, stop_token_ids=tuple(range(0, 60, 2))),
    "several": SamplingParams(max_tokens=12, seed=2, n=3),
    "beams": SamplingParams(max_tokens=8, beam_width=3, n=2),
    "log probabilities": SamplingParams(max_tokens=12, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True),
}


@pytest.mark.parametrize("drafter", ["itself", "shallow", "first layers"])
def test_a_text_that_is_read_before_there_is_any_request_changes_nothing(
    drafters: dict[str, str], drafter: str
) -> None:
    """As a GPU's kernels are compiled."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    answers = []
    for warm in (False, True):
        engine = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=3, **ENGINE)
        if warm:
            with torch.inference_mode():
                engine.drafter.warm_up(engine.drafter.longest_piece)  # type: ignore[union-attr]
        answers.append((tokens(engine, params), engine.drafting.total.accepted))  # type: ignore[union-attr]
    assert answers[0] == answers[1]


def test_a_load_without_drafts_is_computed_as_without_a_drafter(drafters: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    engine = Engine(drafters["itself"], drafter=drafters["shallow"], draft_tokens=3, **ENGINE)
    before = tokens(engine, params)
    drafted = list(engine.drafting.total.drafted)  # type: ignore[union-attr]
    with undrafted(engine):
        assert engine.executor.drafter is None
        assert tokens(engine, params) == before
        assert engine.drafting.total.drafted == drafted  # type: ignore[union-attr]
    assert tokens(engine, params) == before
    assert sum(engine.drafting.total.drafted) > sum(drafted)  # type: ignore[union-attr]


@pytest.mark.few(2)
@pytest.mark.parametrize("drafter", ["near", "shallow", "lookup", "both", "first layers", "head"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_a_drafter(drafters: dict[str, str], drafter: str, case: str) -> None:
    alone = Engine(drafters["itself"], **ENGINE).generate(PROMPTS, CASES[case])
    drafted = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=3, **ENGINE).generate(
        PROMPTS, CASES[case]
    )
    for a, b in zip(alone, drafted, strict=True):
        assert [each.token_ids for each in a.outputs] == [each.token_ids for each in b.outputs]
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert y.finish_reason == x.finish_reason
            assert y.cumulative_logprob == pytest.approx(x.cumulative_logprob, abs=1e-3)
            for given, expected in zip(y.logprobs or [], x.logprobs or [], strict=True):
                assert given == pytest.approx(expected, abs=1e-4)
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
    if case == "beams":
        assert all(output.draft_tokens == 0 for output in drafted)
    elif drafter == "near":
        assert sum(output.draft_tokens for output in drafted) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["near", "shallow", "lookup", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5},
        {"kv_cache_memory_bytes": None, "max_num_seqs": 2},
        {"block_size": 4, "blocks": 24, "admission": "immediate"},
        {"block_size": 4, "blocks": 24, "admission": "immediate", "host_cache_bytes": 1 << 20, "swap": "swap"},
        {"policy": "mlfq", "max_num_seqs": 2},
        {"policy": "prefill_first"},
        {"policy": "sarathi", "max_num_batched_tokens": 7},
        {"kv_cache_dtype": "int8"},
        {"enable_prefix_caching": False},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
def test_whatever_the_cache_and_the_scheduler_do(
    drafters: dict[str, str], drafter: str, options: dict[str, Any]
) -> None:
    given = {**ENGINE, **options}
    blocks = given.pop("blocks", None)

    def engine(**more: Any) -> Engine:
        if blocks is None:
            return Engine(drafters["itself"], **given, **more)
        probe = Engine(drafters["itself"], **given, **more).reservation
        return Engine(
            drafters["itself"], **(given | {"kv_cache_memory_bytes": probe.cache // probe.blocks * blocks}), **more
        )

    alone, drafted = engine(), engine(drafter=drafters[drafter], draft_tokens=5)
    long = SamplingParams(max_tokens=40, seed=4, temperature=0.5, ignore_eos=True)
    for _ in range(2):  # the second time with prefixes that are cached
        assert tokens(drafted, long) == tokens(alone, long)
    if blocks:
        assert drafted.scheduler.preemptions > 0
    for each in (alone, drafted):
        each.cache.check([])


class Alternating:
    """Odd and even tokens in turn, a fixed number of them."""

    def __init__(self, left: int = 9, odd: bool = True) -> None:
        self.left, self.odd = left, odd

    def start(self) -> Matcher:
        return Alternating()

    def copy(self) -> Matcher:
        return Alternating(self.left, self.odd)

    def forbid(self, row: Tensor) -> None:
        row[1 - self.odd :: 2] = float("-inf")

    def accept(self, token: int) -> None:
        assert token % 2 == self.odd
        self.left, self.odd = self.left - 1, not self.odd

    @property
    def is_complete(self) -> bool:
        return self.left <= 0

    @property
    def failure(self) -> str | None:
        return None


@pytest.mark.parametrize("drafter", ["itself", "near", "shallow", "lookup", "both", "head"])
def test_constraints_are_followed(drafters: dict[str, str], drafter: str) -> None:
    params = SamplingParams(max_tokens=24, seed=5, constraint=Alternating())
    alone = tokens(Engine(drafters["itself"], **ENGINE), params)
    engine = Engine(drafters["itself"], drafter=drafters[drafter], draft_tokens=4, **ENGINE)
    assert tokens(engine, params) == alone
    assert all(len(each) == 9 for (each,) in alone)
    if drafter == "itself":
        assert engine.drafting is not None
        assert engine.drafting.total.acceptance == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.5, "top_p": 0.8}, {"presence_penalty": 1.0, "top_k": 12}], ids=str
)
def test_sampled_tokens_follow_the_models_distribution(
    tiny: Callable[..., Path], tmp_path: Path, params: dict[str, Any]
) -> None:
    """Pairs of tokens that were verified, beside probabilities from transformers' logits, by a chi-squared test."""
    size, prompt, draws = 24, [3, 7, 5], 3000
    path = tiny("llama", vocab_size=size, bos_token_id=1, eos_token_id=2)
    other = make_model("llama", torch.float32, vocab_size=size, bos_token_id=1, eos_token_id=2)
    drafter = str(save_model(perturbed(other, 0.5), tmp_path / "other"))
    engine = Engine(path, drafter=drafter, draft_tokens=2, quiet=True, max_model_len=16, max_num_seqs=64)
    sampling = [SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, **params) for seed in range(draws)]
    outputs = engine.generate([prompt] * draws, sampling)
    assert engine.drafting is not None
    assert 0 < (engine.drafting.total.acceptance or 0) < 1
    seen = Counter(tuple(output.outputs[0].token_ids[1:]) for output in outputs)

    model = AutoModelForCausalLM.from_pretrained(path)

    def shares(generated: list[list[int]]) -> Tensor:
        """Of the tokens after each of these."""
        with torch.no_grad():
            rows = model(torch.tensor([prompt + each for each in generated])).logits[:, -1].double()
        for row, each in zip(rows, generated, strict=True):
            row[sorted(set(each))] -= params.get("presence_penalty", 0.0)
        rows /= params.get("temperature", 1.0)
        if "top_k" in params:
            rows[rows < rows.topk(params["top_k"]).values[:, -1:]] = -math.inf
        if "top_p" in params:
            ordered = rows.softmax(-1).sort(descending=True)
            gone = ordered.values.cumsum(-1) - ordered.values >= params["top_p"]
            rows[torch.zeros_like(gone).scatter(1, ordered.indices, gone)] = -math.inf
        return rows.softmax(-1)

    tokens = range(size)
    second = shares([[a] for a in tokens])
    third = shares([[a, b] for a in tokens for b in tokens]).view(size, size, size)
    pairs = torch.einsum("a,ab,abc->bc", shares([[]])[0], second, third)
    expected = {(b, c): float(pairs[b, c]) for b in tokens for c in tokens if pairs[b, c] > 0}
    assert set(seen) <= set(expected)
    often = {pair: share for pair, share in expected.items() if share * draws >= 5}
    cells = [(seen[pair], share * draws) for pair, share in often.items()]
    rest = (1 - sum(often.values())) * draws
    if rest >= 5:
        cells.append((draws - sum(seen[pair] for pair in often), rest))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    # Wilson and Hilferty's normal approximation; one of ten thousand exact samplers exceeds 3.7.
    degrees = len(cells) - 1
    score = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert score < 3.7


def test_an_early_exit_drafts_what_the_first_layers_say(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """As transformers cuts the model: a checkpoint of these layers is accepted at the same places."""
    path = tiny("llama")
    cut = AutoModelForCausalLM.from_pretrained(path, num_hidden_layers=2)
    found = []
    for drafter in ("early-exit:2", str(save_model(cut, tmp_path / "cut"))):
        engine = Engine(path, drafter=drafter, draft_tokens=3, **ENGINE)
        tokens(engine, GREEDY)
        assert engine.drafting is not None
        found.append(engine.drafting.total)
    assert found[0] == found[1]
    assert found[0].verified > 0


def test_adapters_do_not_change_layers_that_draft(tiny: Callable[..., Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = tiny("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(tmp_path / "adapter")
    engine = Engine(path, drafter="early-exit:2", **ENGINE)
    with pytest.raises(RuntimeProblem, match="use another drafter"):
        engine.load_adapter("mine", tmp_path / "adapter")


def test_a_drafter_with_a_shorter_context_stops_there(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """With learned positions it could not even be asked."""
    path = tiny("opt")
    short = make_model("opt", torch.float32, max_position_embeddings=24)
    drafter = str(save_model(short, tmp_path / "short"))
    prompts = [[5, 6, 7], list(range(5, 40))]
    alone = tokens(Engine(path, **ENGINE), GREEDY, prompts)
    engine = Engine(path, drafter=drafter, draft_tokens=4, **ENGINE)
    assert tokens(engine, GREEDY, prompts) == alone
    assert engine.drafting is not None
    assert engine.drafting.total.verified > 0


@pytest.mark.few(2)
@pytest.mark.parametrize("drafter_is_larger", [True, False])
@pytest.mark.parametrize("branches", [0, 2])
@pytest.mark.parametrize("case", ["greedy", "sampled", "greedy with penalties"])
def test_a_drafter_whose_table_is_padded_otherwise(
    tiny: Callable[..., Path], tmp_path: Path, drafter_is_larger: bool, branches: int, case: str
) -> None:
    """As models of one family have the same tokenizer and tables of several sizes. Tokens of the padding are likely here."""
    plain = tiny("llama")
    model = AutoModelForCausalLM.from_pretrained(plain)
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 64)
    torch.manual_seed(3)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[known:] = 1.2 * table.weight[:64]
    padded = save_model(model, tmp_path / "padded")
    path, drafter = (plain, padded) if drafter_is_larger else (padded, plain)
    prompts = PROMPTS if drafter_is_larger else [*PROMPTS, [5, known + 4, 7]]
    alone = tokens(Engine(path, **ENGINE), CASES[case], prompts)
    engine = Engine(path, drafter=str(drafter), draft_tokens=4, draft_branches=branches, **ENGINE)
    assert tokens(engine, CASES[case], prompts) == alone
    assert engine.drafting is not None
    assert engine.drafting.total.verified > 0
    assert any(token >= known for output in alone for each in output for token in each) or drafter_is_larger


def test_a_drafter_whose_lm_head_reads_more(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """OPT's reads a projection, which is half as wide as its layers."""
    path = tiny("opt")
    drafter = save_model(make_model("llama", torch.float32, num_hidden_layers=1), tmp_path / "drafter")
    engine = Engine(path, drafter=str(drafter), draft_tokens=2, **ENGINE)
    assert tokens(engine, GREEDY) == tokens(Engine(path, **ENGINE), GREEDY)


def test_draft_tokens_after_an_end_are_not_accepted(tiny: Callable[..., Path]) -> None:
    """What they count is how many of an output's tokens were drafted."""
    path = str(tiny("llama"))
    whole = Engine(path, **ENGINE).generate([PROMPTS[0]], GREEDY)[0].outputs[0].token_ids
    engine = Engine(path, drafter=path, draft_tokens=16, **ENGINE)
    stop = (engine.tokenizer.decode(whole[9:11]),)
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=stop)
    output = engine.generate([PROMPTS[0]], params)[0]
    count = len(output.outputs[0].token_ids)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == whole[:count]
    assert count < 16
    # The first token comes with the prompt, without a draft.
    assert output.accepted_tokens == count - 1
    assert output.draft_tokens >= output.accepted_tokens
    assert engine.drafting is not None
    assert engine.drafting.total.all_accepted == count - 1
    assert engine.drafting.total.rejected == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafter": "nowhere"}, "must be lookup, nested, early-exit:N, a checkpoint's directory"),
        ({"drafter": "early-exit:3"}, "the model has 3 layers; give fewer"),
        ({"drafter": "early-exit:0"}, "must be lookup, nested, early-exit:N"),
        ({"drafter": "early-exit:1", "offload": "disk"}, "would be brought for each draft token"),
        ({"drafter": "lookup", "draft_tokens": 0}, "auto, or from 1 to"),
        ({"drafter": "lookup", "draft_tokens": "many"}, "auto, or from 1 to"),
        ({"draft_tokens": 2}, "drafter is not"),
    ],
    ids=str,
)
def test_bad_drafters_are_refused(tiny: Callable[..., Path], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RuntimeProblem, match=sentence):
        Engine(tiny("llama"), quiet=True, **options)


def test_another_tokenizer_is_refused(tiny: Callable[..., Path]) -> None:
    other = tiny("llama", vocab_size=100, bos_token_id=1, eos_token_id=2)
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(RuntimeProblem, match="vocabulary of 100 tokens"):
        Engine(tiny("llama"), drafter=str(other), quiet=True)


def test_a_drafter_may_be_named_as_a_model_may(tmp_path: Path) -> None:
    """A builtin model, or a run's output; what is neither is refused at once."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoint").symlink_to(SMELT_6M)
    alone = Engine(SMELT_6M).generate("The city of", SamplingParams(temperature=0, max_tokens=8))
    for name in ("builtin:smelt-6m", str(tmp_path / "out")):
        engine = Engine(SMELT_6M, drafter=name, draft_tokens=2)
        found = engine.generate("The city of", SamplingParams(temperature=0, max_tokens=8))
        assert found[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
        assert found[0].accepted_tokens > 0
    with pytest.raises(SmeltError, match="drafter is nothing; it must be"):
        Engine(SMELT_6M, drafter="nothing")
    with pytest.raises(SmeltError, match=r"drafter is .*directory not found"):
        Engine(SMELT_6M, drafter=str(tmp_path / "missing"))

"""The engine against each request alone: whatever else runs, arrives, leaves or takes its memory."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.compress import SmeltError
from smelt.runtime import Engine, QueueFull, RequestOutput, RuntimeProblem, SamplingParams
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...tiny import CONFIGS, SMELT_6M, make_model, save_model
from ..drive import engine

END = 0  # the tiny models' end token
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    # Never alike twice in a row, so that a wrong cache shows in the tokens.
    model = make_model("llama", seed=3)
    return model, save_model(model, tmp_path_factory.mktemp("llama"))


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 4096, (length,), generator=generator).tolist() for length in lengths]


def greedy(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, **options
        )
    return found[0, len(prompt) :].tolist()


def test_checkpoints_are_found_as_commands_find_them(small: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    """A run's output stands for the checkpoint in it."""
    (tmp_path / "checkpoint").symlink_to(small[1])
    prompt = [5, 9, 11]
    found = Engine(tmp_path, quiet=True).generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert found == Engine(small[1], quiet=True).generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert Engine("builtin:smelt-6m", quiet=True).model.spec.vocabulary == 4096
    with pytest.raises(SmeltError, match="nowhere"):
        Engine(tmp_path / "nowhere")


@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_greedy_tokens_are_those_of_generate(architecture: str, tmp_path: Path) -> None:
    """Ragged prompts, some longer than a step, in a cache so small that some are preempted."""
    model = make_model(architecture, seed=1)
    path = save_model(model, tmp_path)
    block = 2 * 3 * 8 * model.config.hidden_size * 4 // (1 if architecture in ("opt", "gpt_neox", "gpt2") else 2)
    running = engine(path, max_num_batched_tokens=16, kv_cache_memory_bytes=14 * block, admission="immediate")
    prompts = prompts_of([3, 50, 17, 1, 30])
    found = running.generate(prompts, GREEDY)
    assert running.scheduler.preemptions > 0
    for prompt, output in zip(prompts, found, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt, 24)
    running.cache.check([])


def test_stories_are_as_expected(shared: Path) -> None:
    path = shared / "models" / "stories260K"
    running = engine(path, max_num_seqs=1)
    output = running.generate([1], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))[0]
    text = running.tokenizer.decode([1, *output.outputs[0].token_ids], skip_special_tokens=True)
    assert text.strip() == (path / "expected_greedy_200.txt").read_text().strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, pytest.param({"policy": "static"}, marks=pytest.mark.slow)],
    ids=["shared", "unshared", "static"],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_random_traffic_in_a_starved_cache(
    seed: int, options: dict[str, Any], small: tuple[PreTrainedModel, Path]
) -> None:
    """Thousands of steps of arrivals, aborts, stops and preemptions: every answer is the one given alone."""
    model, path = small
    chance = random.Random(seed)
    block_bytes = 2 * 3 * 8 * 2 * 32 * 4
    running = engine(
        path,
        max_num_batched_tokens=20,
        max_num_seqs=6,
        kv_cache_memory_bytes=18 * block_bytes,
        admission="immediate",
        **options,
    )
    beginnings = prompts_of([24, 16], seed=9)
    alone: dict[tuple[int, ...], list[int]] = {}
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    finished: dict[str, RequestOutput] = {}
    for _ in range(700):
        if chance.random() < 0.12 and len(asked) < 60:
            shared_part = chance.choice([[], *beginnings])
            prompt = shared_part + prompts_of([chance.randrange(1, 30)], seed=chance.randrange(6))[0]
            if tuple(prompt) not in alone:
                alone[tuple(prompt)] = greedy(model, prompt, 40)
            stops = (chance.choice(alone[tuple(prompt)]),) if chance.random() < 0.3 else ()
            params = SamplingParams(
                temperature=0, max_tokens=chance.randrange(1, 40), n=chance.choice([1, 1, 1, 3]), stop_token_ids=stops
            )
            asked[running.add_request(prompt, params)] = (prompt, params)
        waiting = [name for name in asked if name not in finished]
        if waiting and chance.random() < 0.01:
            name = chance.choice(waiting)
            running.abort(name)
            del asked[name]
        for output in running.step():
            if output.finished:
                finished[output.request_id] = output
        _conserved(running)
    while running.has_work:
        finished |= {output.request_id: output for output in running.step() if output.finished}
        _conserved(running)
    running.cache.check([])
    assert running.cache.free == running.cache.blocks
    assert finished.keys() == asked.keys()
    assert len(finished) > 40
    if options.get("policy") != "static":
        assert running.scheduler.preemptions > 3
    for name, (prompt, params) in asked.items():
        expected = alone[tuple(prompt)][: params.max_tokens]
        stops_at = [i + 1 for i, token in enumerate(expected) if token in (END, *params.stop_token_ids)]
        for completion in finished[name].outputs:
            assert completion.token_ids == expected[: min(stops_at, default=len(expected))]
            assert completion.finish_reason == ("stop" if stops_at else "length")


def _conserved(running: Engine) -> None:
    everybody = [*running.scheduler.running, *running.scheduler.waiting]
    running.cache.check([sequence.blocks for sequence in everybody])


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [2, 4])
def test_beam_search_is_that_of_transformers(width: int, small: tuple[PreTrainedModel, Path]) -> None:
    model, path = small
    for cache_blocks in (100, 12):  # the second cannot hold all beams at once
        running = engine(path, kv_cache_memory_bytes=cache_blocks * 2 * 3 * 8 * 2 * 32 * 4)
        for prompt in prompts_of([5, 30, 52]):
            params = SamplingParams(beam_width=width, n=2, max_tokens=20, temperature=0)
            found = running.generate(prompt, params)[0]
            tokens = torch.tensor([prompt])
            with torch.no_grad():
                expected = model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=20,
                    do_sample=False,
                    num_beams=width,
                    num_return_sequences=2,
                )[:, len(prompt) :]
            assert [c.token_ids for c in found.outputs] == expected.tolist()
        running.cache.check([])


@pytest.mark.slow
def test_beams_that_end_are_ranked_as_transformers_ranks_them() -> None:
    running = engine(SMELT_6M)
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    ends = [running.tokenizer(".").input_ids[-1]]
    for text in ("The city of", "Once upon a time there was", "I am"):
        for penalty in (0.0, 1.0, 2.0):
            params = SamplingParams(
                beam_width=3,
                n=3,
                max_tokens=25,
                temperature=0,
                stop_token_ids=tuple(ends),
                ignore_eos=True,
                length_penalty=penalty,
            )
            found = running.generate(text, params)[0]
            tokens = torch.tensor([found.prompt_token_ids])
            expected = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=25,
                do_sample=False,
                num_beams=3,
                num_return_sequences=3,
                eos_token_id=ends,
                length_penalty=penalty,
            )[:, tokens.shape[1] :].tolist()
            for completion, reference in zip(found.outputs, expected, strict=True):
                assert completion.token_ids == reference[: len(completion.token_ids)]


@pytest.mark.slow
def test_beams_are_changed_and_stopped_as_transformers_does() -> None:
    """Biases, penalties, least lengths and stop strings; and log probabilities that are the model's own."""
    running = engine(SMELT_6M)
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    end, favoured = running.tokenizer(".").input_ids[-1], running.tokenizer(" sea").input_ids[-1]
    stops = (" and", "ing")
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"logit_bias": {favoured: 4.0}}, {"sequence_bias": {(favoured,): 4.0}}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"min_tokens": 9, "stop_token_ids": (end,)}, {"min_new_tokens": 9, "eos_token_id": [end]}),
        ({"stop": stops}, {"stop_strings": list(stops), "tokenizer": running.tokenizer}),
    ]
    for text in ("The city of", "Once upon a time there was"):
        for mine, theirs in asked:
            params = SamplingParams(
                beam_width=3, n=3, max_tokens=20, temperature=0, ignore_eos=True, logprobs=2, **mine
            )
            found = running.generate(text, params)[0]
            tokens = torch.tensor([found.prompt_token_ids])
            options = {"eos_token_id": None, "max_new_tokens": 20, "num_beams": 3, "num_return_sequences": 3, **theirs}
            expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **options)
            for completion, reference in zip(found.outputs, expected[:, tokens.shape[1] :].tolist(), strict=True):
                assert completion.token_ids == reference[: len(completion.token_ids)]
                whole = torch.tensor([[*found.prompt_token_ids, *completion.token_ids]])
                with torch.no_grad():
                    rows = model(whole).logits[0, tokens.shape[1] - 1 : -1].log_softmax(-1)
                own = rows.gather(-1, whole[0, tokens.shape[1] :, None])[:, 0]
                assert completion.cumulative_logprob == pytest.approx(own.sum().item(), abs=1e-3)
                assert completion.logprobs is not None
                for place, logprobs in enumerate(completion.logprobs):
                    assert logprobs[completion.token_ids[place]] == pytest.approx(own[place].item(), abs=1e-4)
                if isinstance(completion.stop_reason, str):
                    assert completion.stop_reason in stops
                    assert completion.text is not None
                    assert not any(stop in completion.text for stop in stops)


def test_samples_depend_on_their_seed_alone(small: tuple[PreTrainedModel, Path]) -> None:
    _, path = small
    mine, *others = prompts_of([20, 9, 33, 14])
    params = SamplingParams(seed=7, n=3, max_tokens=15, top_p=0.9, temperature=0.8)
    alone = engine(path).generate(mine, params)[0]
    crowded = engine(path, max_num_batched_tokens=13).generate(
        [*others, mine], [SamplingParams(max_tokens=30)] * 3 + [params]
    )[3]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in crowded.outputs]
    assert len({tuple(c.token_ids) for c in alone.outputs}) == 3
    again = engine(path).generate(mine, SamplingParams(seed=8, n=3, max_tokens=15, top_p=0.9, temperature=0.8))[0]
    assert again.outputs[0].token_ids != alone.outputs[0].token_ids


def test_log_probabilities_are_the_models_own(small: tuple[PreTrainedModel, Path]) -> None:
    model, path = small
    prompt = prompts_of([37])[0]
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=9, logprobs=3, prompt_logprobs=2, repetition_penalty=1.3
    )
    for budget in (64, 7):
        running = engine(path, max_num_batched_tokens=budget)
        running.generate(prompt, GREEDY)  # so that the prompt's blocks are there to be found, and must not be
        found = running.generate(prompt, params)[0]
        completion = found.outputs[0]
        whole = [*prompt, *completion.token_ids]
        with torch.no_grad():
            expected = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        assert completion.logprobs is not None
        assert found.prompt_logprobs is not None
        assert len(found.prompt_logprobs) == len(prompt) - 1
        every = [*found.prompt_logprobs, *completion.logprobs]
        for place, logprobs in enumerate(every):
            assert whole[place + 1] in logprobs
            best = expected[place].topk(2 if place < len(prompt) - 1 else 3).indices.tolist()
            assert set(best) <= set(logprobs)
            for token, value in logprobs.items():
                assert value == pytest.approx(expected[place, token].item(), abs=1e-4)
        total = sum(expected[len(prompt) - 1 + i, t].item() for i, t in enumerate(completion.token_ids))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_streaming_gives_growing_text_and_leaving_early_frees_everything() -> None:
    running = engine(SMELT_6M)
    whole = running.generate("The city of", SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]

    async def two() -> tuple[list[str], int]:
        async def listen() -> list[str]:
            return [
                output.outputs[0].text or ""
                async for output in running.stream("The city of", SamplingParams(temperature=0, max_tokens=20))
            ]

        async def leave() -> int:
            count = 0
            stream = running.stream("Once upon", SamplingParams(temperature=0, max_tokens=200))
            async for _ in stream:
                count += 1
                if count == 3:
                    break
            await stream.aclose()  # type: ignore[attr-defined]
            return count

        return await asyncio.gather(listen(), leave())

    texts, count = asyncio.run(two())
    assert count == 3
    assert texts[-1] == whole.text
    assert len(texts) <= 20  # a reader may be slower than the engine
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    while running.has_work:
        time.sleep(0.01)
    running.cache.check([])


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "the prompt is empty"),
    ([5, 4096], {}, "token 4096, outside the vocabulary of 4096"),
    ([5, -1], {}, "token -1, outside"),
    ([5] * 128, {}, "has 128 tokens, and the engine's max_model_len of 128"),
    ([5] * 60, {"max_tokens": 68}, r"may grow to 128 tokens, which need 16 cache blocks, but there are 10"),
    ([5], {"n": 9}, "asks for 9 sequences at once, and the engine runs at most 8"),
    ([5], {"logit_bias": {9999: 1.0}}, "name token 9999"),
]


@pytest.mark.parametrize(("prompt", "params", "sentence"), BAD, ids=[b[2][:25] for b in BAD])
def test_a_request_that_cannot_be_served_is_refused_and_the_others_go_on(
    prompt: list[int], params: dict[str, Any], sentence: str, small: tuple[PreTrainedModel, Path]
) -> None:
    model, path = small
    running = engine(path, kv_cache_memory_bytes=10 * 2 * 3 * 8 * 2 * 32 * 4)
    good = prompts_of([12])[0]
    name = running.add_request(good, GREEDY)
    running.step()
    with pytest.raises(RuntimeProblem, match=sentence):
        running.add_request(prompt, SamplingParams(**{"max_tokens": 4} | params))
    outputs = {}
    while running.has_work:
        outputs |= {output.request_id: output for output in running.step()}
    assert outputs[name].outputs[0].token_ids == greedy(model, good, 24)


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 0), ("max_tokens", 0), ("temperature", -1), ("top_p", 0), ("min_p", 2), ("top_k", -2), ("min_tokens", 200),
     ("repetition_penalty", 0), ("stop", ("",)), ("beam_width", -1), ("logprobs", -1), ("temperature", float("nan"))],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RuntimeProblem, match=f"^{field} is .*; it must be"):
        SamplingParams(**{field: value})


def _with_weights_of(model: PreTrainedModel, path: Path) -> Engine:
    """Weights that no checkpoint may have reach an engine as those of a model in memory."""
    running = engine(save_model(make_model("llama", seed=3), path))
    weights = model.state_dict()
    running.take_weights(model.config, weights, weights.__getitem__)
    return running


def test_logits_that_are_not_numbers_end_only_their_request(
    small: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model, _ = small
    broken = make_model("llama", seed=3)
    with torch.no_grad():
        broken.model.embed_tokens.weight[77] = float("nan")
    running = _with_weights_of(broken, tmp_path)
    good, poisoned = prompts_of([12, 20])
    poisoned[10] = 77
    found = running.generate([good, poisoned], GREEDY)
    assert found[0].outputs[0].token_ids == greedy(model, good, 24)
    assert found[1].outputs[0].finish_reason == "error"
    assert found[1].error is not None
    assert "NaN or infinite" in found[1].error
    running.cache.check([])


def test_one_broken_beam_ends_its_request_and_no_other(small: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    """One beam goes on with a token whose logits are not numbers while its siblings' are."""
    broken = make_model("llama", seed=3)
    with torch.no_grad():
        broken.model.embed_tokens.weight[77] = float("nan")
    running = _with_weights_of(broken, tmp_path)
    first, second = prompts_of([12, 20])
    poisoned = SamplingParams(beam_width=3, max_tokens=10, temperature=0, logit_bias={77: 100.0})
    sound = SamplingParams(beam_width=2, n=2, max_tokens=10, temperature=0)
    alone = running.generate(second, sound)[0]
    found = running.generate([first, second, first], [poisoned, sound, poisoned])
    for output in (found[0], found[2]):
        assert output.error is not None
        assert "NaN or infinite" in output.error
    assert [c.token_ids for c in found[1].outputs] == [c.token_ids for c in alone.outputs]
    assert not running.has_work
    running.cache.check([])


def test_a_cache_that_does_not_fit_is_refused_with_arithmetic(small: tuple[PreTrainedModel, Path]) -> None:
    with pytest.raises(
        RuntimeProblem, match=r"the KV cache does not fit: .* are free besides .* of weights.*a block of 8 positions is"
    ):
        engine(small[1], kv_cache_memory_bytes=1 << 60, max_num_seqs=1 << 22)
    with pytest.raises(RuntimeProblem, match="the KV cache does not fit"):
        engine(small[1], kv_cache_memory_bytes=10)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("block_size", 0),
        ("memory_utilization", 1.5),
        ("dtype", "int3"),
        ("device", "tpu"),
        ("device", "cuda:77"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: Any, small: tuple[PreTrainedModel, Path]) -> None:
    with pytest.raises(RuntimeProblem, match=f"{option} is"):
        engine(small[1], **{option: value})


Damage = Callable[[Path], Any]
DAMAGES: list[tuple[str, Damage, str]] = [
    ("no config", lambda p: (p / "config.json").unlink(), "has no config.json"),
    ("no weights", lambda p: (p / "model.safetensors").unlink(), "has no safetensors weights"),
    ("truncated", lambda p: (p / "model.safetensors").write_bytes((p / "model.safetensors").read_bytes()[:5000]), "the file is truncated"),
    ("config is no JSON", lambda p: (p / "config.json").write_text("{"), "is not valid JSON"),
    ("index lies", lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}'), "the index lists x here"),
    ("shard is missing", lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}'), "b.safetensors is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "sentence"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_checkpoint_is_one_sentence(damage: Damage, sentence: str, tmp_path: Path) -> None:
    path = save_model(make_model("llama"), tmp_path)
    damage(path)
    with pytest.raises(SmeltError, match=sentence):
        engine(path)


def test_it_explains_what_computes_what(small: tuple[PreTrainedModel, Path]) -> None:
    explanations = engine(small[1]).explain()
    assert explanations.keys() == {"head", "query, key, value", "attention out", "gate, up", "down"}
    assert all("F.linear" in kernel for kernel in explanations.values())


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(small: tuple[PreTrainedModel, Path]) -> None:
    model, path = small
    running = engine(path)
    execute, calls = running.executor.execute, itertools.count()

    def breaks(plan: Any) -> Any:
        if next(calls) == 1:
            raise MemoryError("no room for the logits")
        return execute(plan)

    running.executor.execute = breaks  # type: ignore[method-assign]
    first, second = prompts_of([70, 9])
    name = running.add_request(first, GREEDY)
    running.step()
    with pytest.raises(MemoryError):
        running.step()
    assert not running.is_running(name)
    assert not running.has_work
    running.cache.check([])
    assert running.generate(second, GREEDY)[0].outputs[0].token_ids == greedy(model, second, 24)


@pytest.mark.parametrize(("kept", "allowed"), [("int8", 0.002), ("fp8", 0.01)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_in_fewer_bits_costs_little(kept: str, allowed: float, dtype: str) -> None:
    """The mean log probability of a text read in pieces, each over what the cache has kept of those before."""
    text = (
        "Once upon a time there was a little dog who lived by the sea. Every morning he ran to the water and barked. "
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    means = {}
    for cache in ("auto", kept):
        running = engine(SMELT_6M, dtype=dtype, kv_cache_dtype=cache, max_num_batched_tokens=16)
        tokens = running.tokenizer(4 * text).input_ids
        found = running.generate(tokens, params)[0].prompt_logprobs
        assert found is not None
        logprobs = [one[token] for one, token in zip(found, tokens[-len(found) :], strict=True)]
        means[cache] = sum(logprobs) / len(logprobs)
        halved = running.reservation.cache / running.reservation.positions
    per_position = 2 * 6 * 4 * (32 + 4)  # layers, heads, numbers and a scale
    assert halved == per_position
    assert means[kept] != means["auto"]
    assert means[kept] == pytest.approx(means["auto"], rel=allowed)


def test_native_kernels_serve_random_traffic(tmp_path: Path) -> None:
    """In bfloat16 the number of rows decides who multiplies, so tokens may differ; blocks and ends may not."""
    running = engine(
        SMELT_6M, dtype="bfloat16", max_num_batched_tokens=24, kv_cache_memory_bytes=400_000, max_model_len=96
    )
    chance = random.Random(5)
    alive: set[str] = set()
    done = 0
    for step in range(400):
        if step < 300 and chance.random() < 0.3:
            length = chance.randrange(1, 60)
            alive.add(
                running.add_request(prompts_of([length], step)[0], SamplingParams(max_tokens=chance.randrange(1, 20)))
            )
        for output in running.step():
            if output.finished:
                alive.discard(output.request_id)
                done += 1
                assert output.error is None
        if alive and chance.random() < 0.02:
            running.abort(alive.pop())
        running.cache.check([s.blocks for r in running.core.requests.values() for s in r.sequences])
    assert done > 40
    assert running.scheduler.preemptions > 0


def test_a_static_batch_is_what_waited_when_it_began(small: tuple[PreTrainedModel, Path]) -> None:
    """As many as may run, though a step does not hold all their prompts; and nobody joins before all have ended."""
    model, path = small
    running = engine(path, policy="static", max_num_seqs=3, max_num_batched_tokens=16)
    prompts = prompts_of([12] * 7)
    counts = [5, 9, 6, 5, 5, 5, 2]
    names = [
        running.add_request(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    seen: list[set[str]] = []
    tokens: dict[str, list[int]] = {}
    while running.has_work:
        tokens |= {output.request_id: output.outputs[0].token_ids for output in running.step()}
        seen.append({sequence.request.id for sequence in running.scheduler.running})
    batches = [set(names[:3]), set(names[3:6]), set(names[6:])]
    assert all(any(those <= batch for batch in batches) for those in seen)
    assert all(batch in seen for batch in batches[:2])
    for name, prompt, count in zip(names, prompts, counts, strict=True):
        assert tokens[name] == greedy(model, prompt, count)


def test_a_full_queue_refuses_and_outputs_say_how_long_they_waited(small: tuple[PreTrainedModel, Path]) -> None:
    running = engine(small[1], max_waiting=2, max_num_seqs=1, block_size=4)
    prompt = list(range(1, 14))
    running.generate(prompt, GREEDY)  # its blocks are found again
    for name in ("first", "second"):
        running.add_request(prompt, GREEDY, id=name)
    with pytest.raises(
        QueueFull, match="2 requests are waiting already, as many as max_waiting allows; try again later"
    ):
        running.add_request(prompt, GREEDY)
    running.step()
    running.add_request(prompt, GREEDY, id="third")
    done = {}
    while running.has_work:
        done |= {output.request_id: output for output in running.step() if output.finished}
    assert set(done) == {"first", "second", "third"}
    assert [done[name].num_cached_tokens for name in done] == [12, 12, 12]
    waited = [done[name].queue_seconds for name in ("first", "second", "third")]
    assert 0 <= waited[0] < waited[1] < waited[2]
    assert len(running.generate([prompt] * 5, GREEDY)) == 5, "one call may give more"


def test_a_preempted_request_says_so(small: tuple[PreTrainedModel, Path]) -> None:
    running = engine(small[1], kv_cache_memory_bytes=10 * 2 * 3 * 8 * 2 * 32 * 4, admission="immediate")
    found = running.generate([[1] * 30, [2] * 30], GREEDY)
    assert running.scheduler.preemptions == sum(output.preemptions for output in found) > 0
    assert found[0].preemptions == 0

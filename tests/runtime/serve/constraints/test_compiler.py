"""Constraints on the engine: outputs that follow, grammars that cannot be followed."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from typing import Any

import jsonschema
import pytest
import torch
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.answer.schema import HERMES, LLAMA3_JSON, MISTRAL_ARGS, MISTRAL_ARRAY, CallFormat
from smelt.runtime.serve.constraints.compiler import Compiler
from smelt.runtime.serve.constraints.grammar import (
    Grammar,
    calls_or_json,
    choices,
    expression,
    json_text,
    optional_calls,
    tool_calls,
)
from smelt.runtime.serve.http.errors import ApiError
from tokenizers import AddedToken

from ....tiny import SMELT_6M
from ...drive import engine as small_engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> Compiler:
    return Compiler(engine.tokenizer, engine.model.spec.vocabulary, engine.ends)


@pytest.mark.slow
def test_each_sample_follows_beside_others_that_are_free(compiler: Compiler) -> None:
    """In a cache so small that requests lose their blocks and are computed again."""
    engine = small_engine(SMELT_6M, max_model_len=128, kv_cache_memory_bytes=2_000_000)
    constrained = SamplingParams(max_tokens=120, n=2, seed=1, constraint=compiler.compile(json_text(SCHEMA)))
    free = SamplingParams(max_tokens=120, seed=2, ignore_eos=True)
    outputs = engine.generate([[5, 6, 7 + i] for i in range(8)], [constrained if i % 2 else free for i in range(8)])
    alone = engine.generate([[5, 6, 7]], free)[0]
    assert engine.scheduler.preemptions > 0
    assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    for output in outputs[1::2]:
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(completion.text or ""), SCHEMA)


def test_the_only_text_is_generated_greedily_and_ends_at_once(compiler: Compiler, engine: Engine) -> None:
    for grammar, text in ((choices(["only this"]), "only this"), (expression("ab{3}c"), "abbbc")):
        params = SamplingParams(temperature=0, max_tokens=50, min_tokens=30, constraint=compiler.compile(grammar))
        completion = engine.generate([[5, 6]], params)[0].outputs[0]
        assert (completion.text, completion.finish_reason) == (text, "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_that_a_grammar_permits_wait_for_min_tokens(
    temperature: float, compiler: Compiler, engine: Engine
) -> None:
    """Of a model that likes to end."""
    constraint = compiler.compile(expression("[a-zA-Z ,.]{2,500}"))
    bias = dict.fromkeys(engine.ends, 12.0)
    params = [
        SamplingParams(
            max_tokens=24, min_tokens=20, seed=i, temperature=temperature, logit_bias=bias, constraint=constraint
        )
        for i in range(8)
    ]
    for output in engine.generate(["He said"] * 8, params):
        (found,) = output.outputs
        assert not engine.ends & set(found.token_ids[:19])
        assert 20 <= len(found.token_ids) < 24
        assert (found.token_ids[-1] in engine.ends, found.finish_reason) == (True, "stop")


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_a_grammar_and_allowed_tokens_that_exclude_each_other(drafter: str | None, compiler: Compiler) -> None:
    with closing(Engine(SMELT_6M, drafter=drafter, draft_tokens=2 if drafter else "auto", quiet=True)) as running:
        letters = running.tokenizer("ab", add_special_tokens=False).input_ids
        constraint = compiler.compile(expression("a{0,3}[0-9]+"))
        params = SamplingParams(max_tokens=9, temperature=0, allowed_token_ids=letters, constraint=constraint)
        (found,) = running.generate([[5, 6, 7]], params)
        assert found.error is not None
        assert "none that the grammar permits is one of allowed_token_ids" in found.error
        assert found.is_invalid
        assert found.outputs[0].finish_reason == "error"


def test_after_a_token_the_rest_follows(compiler: Compiler, engine: Engine) -> None:
    """As after the end of reasoning: until then everything is allowed."""
    end = engine.tokenizer.convert_tokens_to_ids("<|end|>")
    compiled = compiler.compile(choices(["yes"]), end)
    biased = SamplingParams(
        max_tokens=20, logit_bias={end: 100.0}, temperature=0, constraint=compiled, skip_special_tokens=False
    )
    assert engine.generate([[5, 6]], biased)[0].outputs[0].text == "<|end|>yes"
    free = SamplingParams(max_tokens=9, temperature=0, constraint=compiled)
    unconstrained = engine.generate([[5, 6]], SamplingParams(max_tokens=9, temperature=0))[0]
    assert engine.generate([[5, 6]], free)[0].outputs[0].token_ids == unconstrained.outputs[0].token_ids


@pytest.mark.slow
def test_a_grammar_that_becomes_too_complex_ends_its_own_request(compiler: Compiler, engine: Engine) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    params = SamplingParams(temperature=0, max_tokens=30, constraint=compiler.compile(json_text(wide)))
    failed, other = engine.generate([[5, 6], [5, 6]], [params, SamplingParams(temperature=0, max_tokens=30)])
    assert "too complex" in (failed.error or "")
    assert failed.is_invalid
    assert other.error is None
    assert len(other.outputs[0].token_ids) == 30
    # All outputs of a grammar share its limits.
    assert compiler.compile(json_text(wide)) is not params.constraint


def test_one_that_becomes_too_complex_within_an_output_does_not_end_it_as_if_it_were_whole(
    compiler: Compiler, engine: Engine
) -> None:
    grammar = expression("(.*a.{200}|.*b.{150}|.*c.{180}|.*d.{160}|.*e.{190})x")
    for seed in (1, 2):
        params = SamplingParams(max_tokens=110, seed=seed, constraint=compiler.compile(grammar))
        (output,) = engine.generate([[5, 6]], params)
        (completion,) = output.outputs
        assert len(completion.token_ids) > 3
        assert "too complex" in (output.error or "") or completion.finish_reason == "length"


DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}


def _allows(matcher: Any, engine: Engine, text: str) -> bool:
    """Whether a text may follow, token by token."""
    for token in engine.tokenizer(text, add_special_tokens=False).input_ids:
        row = torch.zeros(engine.model.spec.vocabulary)
        matcher.forbid(row)
        if row[token] == float("-inf"):
            return False
        matcher.accept(token)
    return True


@pytest.mark.parametrize(
    ("form", "good", "wrong"),
    [
        (
            HERMES,
            'I look. <tool_call>\n{"name": "f", "arguments": {"days": 5}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments":'
            ' {"x": [1]}}\n</tool_call> There.',
            '<tool_call>\n{"name": "f", "arguments": {"days": "five"',
        ),
        (
            LLAMA3_JSON,
            '{"name": "f", "parameters": {"days": 5}}; {"name": "f", "parameters": {"days": 6}}',
            '{"name": "h"',
        ),
        (
            MISTRAL_ARRAY,
            'So: [TOOL_CALLS] [{"name": "f", "arguments": {"days": 5}}, {"name": "g", "arguments": {}}]',
            '[TOOL_CALLS] [{"name": "f", "arguments": {"hours"',
        ),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"days": 5}', '[TOOL_CALLS]f[ARGS]{"days": true'),
    ],
)
def test_what_begins_as_a_call_ends_as_one(
    form: CallFormat, good: str, wrong: str, compiler: Compiler, engine: Engine
) -> None:
    """Else any text is free: the model decides whether to call."""
    compiled = compiler.compile(optional_calls(form, {"f": DAYS, "g": {"type": "object"}}, several=True))
    matcher = compiled.start()
    assert _allows(matcher, engine, good)
    row = torch.zeros(engine.model.spec.vocabulary)
    matcher.forbid(row)
    assert row[sorted(engine.ends)[0]] == 0, "it may end"
    assert _allows(compiled.start(), engine, "No call, but {braces} and <tags>. [1, 2]\n\nThe end.")
    assert not _allows(compiled.start(), engine, wrong)


@pytest.mark.parametrize("form", [HERMES, LLAMA3_JSON, MISTRAL_ARRAY, MISTRAL_ARGS])
def test_beside_tools_an_answer_in_json_may_be_a_call(form: CallFormat, compiler: Compiler, engine: Engine) -> None:
    """Also if both refer to parts of their own, as pydantic's schemas do."""
    zone = {
        "$defs": {"T": {"type": "string"}},
        "type": "object",
        "properties": {"zone": {"$ref": "#/$defs/T"}},
        "required": ["zone"],
    }
    answer = {**SCHEMA, "$defs": {"T": {"enum": ["x", "y"]}}}
    answer["properties"] = {**SCHEMA["properties"], "b": {"$ref": "#/$defs/T"}}
    grammar = calls_or_json(form, {"now": zone}, answer, several=False)
    call = form.first + form.before("now") + '{"zone": "UTC"}' + form.end + form.last
    for text, allowed in (
        ('{"a": 5, "b": "x"}', True),
        (call, True),
        ('{"a": 500', False),
        ('{"a": 5, "b": "z', False),
        (form.first + form.before("then"), False),
        ("Hello", False),
    ):
        assert _allows(compiler.compile(grammar).start(), engine, text) == allowed, text


def test_tags_are_found_at_once(compiler: Compiler, engine: Engine) -> None:
    """The longest of those that begin at a place, in a text of thousands, which took minutes."""
    ids = engine.tokenizer.get_added_vocab()
    tag = next(iter(ids))
    assert compiler._split(f"a{tag}b{tag}") == ["a", ids[tag], "b", ids[tag]]
    assert len(compiler._split(tag * 50_000)) == 50_000


def test_reasoning_may_come_before_calls(compiler: Compiler, engine: Engine) -> None:
    grammar = optional_calls(HERMES, {"f": DAYS}, several=True, thinking=("<think>", "</think>"))
    call = '<tool_call>\n{"name": "f", "arguments": {"days": '
    compiled = compiler.compile(grammar)
    assert _allows(compiled.start(), engine, f"<think>\nHm.\n</think>\n{call}5")
    assert not _allows(compiled.start(), engine, f"<think>\nHm.\n</think>\n{call}true")
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("<think>", "</think>")])
    with_tokens = Compiler(tokenizer, len(tokenizer), engine.ends).compile(grammar).start()
    for token in tokenizer(f"<think>Hm.</think>{call}5", add_special_tokens=False).input_ids:
        with_tokens.accept(token)
        assert with_tokens.failure is None


def test_a_grammar_is_compiled_once(compiler: Compiler) -> None:
    assert compiler.compile(json_text(SCHEMA)) is compiler.compile(json_text(json.loads(json.dumps(SCHEMA))))


@pytest.mark.parametrize(
    "grammar",
    [
        json_text({"type": "foo"}),
        json_text({"$ref": "#"}),
        json_text({"not": {"type": "string"}}),
        json_text({"$ref": "https://example.org/schema"}),
        expression("("),
        expression("(?=a)b"),
        Grammar("lark", "start: foo"),
        Grammar("lark", "root ::= foo"),
    ],
    ids=lambda grammar: grammar.text[:20],
)
def test_what_cannot_be_followed_is_refused(grammar: Grammar, compiler: Compiler) -> None:
    with pytest.raises(ApiError, match=r"cannot be followed: .+"):
        compiler.compile(grammar)


def test_tags_that_are_tokens_are_written_as_tokens(engine: Engine) -> None:
    """Llguidance never matches an added token as text. What a schema contains is the client's, even if it looks like a tag."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    opens, closes = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>"))
    compiler = Compiler(tokenizer, len(tokenizer), engine.ends)
    schema = {
        "type": "object",
        "properties": {"a": {"const": "<tool_call> %json"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = compiler.compile(tool_calls(HERMES, {"f": schema}, several=False)).start()
    text = '<tool_call>\n{"name": "f", "arguments": {"a":"'
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert tokens[0] == opens
    for token in tokens:
        matcher.accept(token)
        assert matcher.failure is None
    plain = engine.tokenizer('<tool_call> %json"}}\n', add_special_tokens=False).input_ids
    for token in [*plain, closes]:
        matcher.accept(token)
        assert matcher.failure is None
    assert matcher.is_complete

"""The study of serving: each claim runs on a few requests, and its parts against arithmetic and other parts of Smelt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from smelt.models.directory.directory import ModelDirectory
from smelt.models.directory.find import find_model
from smelt.runtime.costs.model_size import model_size
from smelt.runtime.costs.swap_cost import SwapCost
from smelt.runtime.costs.work import LinearCost, StepWork
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.simulate.results import Served
from smelt.runtime.simulate.simulation import simulate
from smelt.system.errors import SmeltError
from transformers import LlamaConfig

from benchmarks import common
from benchmarks.serving import layouts, memory, on_engine, prefixes, study
from benchmarks.serving.engine_run import EngineRun
from benchmarks.serving.setting import LLAMA_3_8B, LLAMA_13B, Claim, Row, Study, at_once, cost_of, transfers
from benchmarks.tables import serving, serving_on_engine


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of the recorded ones' forms, without their data."""
    folder = tmp_path_factory.mktemp("traces")
    lines = [f"2023-11-16 18:15:{second:02}.0000000,{100 + 37 * second},{20 + second}" for second in range(30)]
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n"
    )
    records = [
        {"timestamp": 1000 * i, "input_length": 1100, "output_length": 10, "hash_ids": [0, i % 3, i + 10]}
        for i in range(30)
    ]
    (folder / "mooncake_conversation_trace.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return folder


@pytest.mark.few(4)
@pytest.mark.parametrize("claim", study.CLAIMS)
def test_a_claim_runs_and_its_table_is_written(claim: str, traces: Path, tmp_path: Path) -> None:
    rows = study.CLAIMS[claim](Study(traces, share=0.01))
    assert rows
    machine = {"cores": 2, "cpu": "CPU"}
    known = {"command": "study", "machine": machine, "date": "2001-02-03", "results": {claim: rows}}
    (tmp_path / "serving_study.json").write_text(json.dumps(known))
    table = next(table for table in serving.TABLES.values() if table.claim == claim)
    lines = table.text(tmp_path).splitlines()
    assert len(lines) == 4 + len(rows)
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "claim",
    [each if each == "iterations" else pytest.param(each, marks=pytest.mark.slow) for each in on_engine.CLAIMS],
)
def test_a_claim_runs_on_the_engine_and_its_table_is_written(claim: str, tmp_path: Path) -> None:
    size = model_size(find_model(on_engine.MODEL))
    given = on_engine.EngineStudy(size, LinearCost(step=1e-3, token=1e-5), repeats=1, share=0.01)
    known = {"command": "study", "machine": {"cores": 2, "cpu": "CPU"}, "date": "2001-02-03"}
    rows = on_engine.CLAIMS[claim](given)
    (tmp_path / "serving_on_engine.json").write_text(json.dumps({**known, "results": {claim: rows}}))
    table = next(table for table in serving_on_engine.TABLES.values() if table.claim == claim)
    lines = table.text(tmp_path).splitlines()
    assert len(lines) > 4
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.slow
def test_a_run_on_the_engine_is_counted_as_the_simulator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests at once, so that no clock decides: the same steps, preemptions and positions held and filled."""
    way = on_engine.Way("both", {"policy": "fcfs", "max_num_seqs": 32, "max_num_batched_tokens": 256})
    arrivals = at_once(Study(Path()).random("lognormal:300,0.6", "lognormal:150,0.6", 40, longest=1024))
    # Each step counts the same: by its own time a machine that is busy now and then would count other steps more.
    hold = EngineRun._hold
    monkeypatch.setattr(EngineRun, "_hold", lambda self, _: hold(self, 1.0))
    real = EngineRun.of(way.engine(), arrivals)
    simulated = simulate(arrivals, way.simulated(), LinearCost(step=1.0))
    assert (real.steps, real.preemptions, real.output_tokens) == (
        simulated.steps,
        simulated.preemptions,
        sum(a.output for a in arrivals),
    )
    assert [each.preemptions for each in real.served] == [each.preemptions for each in simulated.served]
    assert all(each.at <= each.started <= each.first <= each.ended for each in real.served)
    # Blocks are looked at after a step on one side, and during it on the other.
    assert real.cache.waste == pytest.approx(simulated.cache.waste, rel=0.02)


def test_claims_that_do_not_run_keep_their_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    ran: list[str] = []

    def claim(name: str) -> Claim:
        def run(_: Study) -> list[Row]:
            ran.append(name)
            return [{"name": name, "run": len(ran)}]

        return run

    monkeypatch.setattr(study, "CLAIMS", {"first": claim("first"), "second": claim("second")})
    for arguments in ([], ["--only", "second"]):
        monkeypatch.setattr(sys, "argv", ["study", *arguments])
        assert study.main() == 0
    assert ran == ["first", "second", "second"]
    results = json.loads((tmp_path / "serving_study.json").read_text())["results"]
    assert results == {"first": [{"name": "first", "run": 1}], "second": [{"name": "second", "run": 3}]}


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match=r"AzureLLMInferenceTrace_conv\.csv is missing; put the trace there"):
        memory.waste(Study(tmp_path, share=0.01))


def test_the_models_are_those_of_their_configurations(tmp_path: Path) -> None:
    shapes = {
        LLAMA_3_8B: (4096, 14336, 32, 32, 8, 128256, 131072),
        LLAMA_13B: (5120, 13824, 40, 40, 40, 32000, 4096),
    }
    for known, (hidden, intermediate, layers, heads, kv_heads, vocabulary, longest) in shapes.items():
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=longest,
        )  # fmt: skip
        config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
        folder = tmp_path / known.name
        config.save_pretrained(folder)
        size = model_size(ModelDirectory(known.name, folder))
        for name in ("weight_bytes", "parameters", "kv_bytes", "attention_width", "kv_heads", "layers", "max_length"):
            assert getattr(known, name) == getattr(size, name), name


def test_samples_share_their_prompt() -> None:
    """A prompt of 10 full blocks and 16 steps: each sequence has a block of its own from the first step on."""
    assert memory.saved_by_sharing([Arrival(0.0, 160, 16)], 0.0) == pytest.approx(1 - (10 + 4) / (4 * 11))
    # The prompt's last block has room for 8 tokens: three of four sequences copy it.
    assert memory.saved_by_sharing([Arrival(0.0, 152, 8)], 0.0) == pytest.approx(1 - (9 + 4) / (4 * 10))


def test_ideal_hits_are_prefixes_that_came_before() -> None:
    arrivals = [Arrival(0.0, 1024, 1, (1, 2)), Arrival(1.0, 1536, 1, (1, 2, 3)), Arrival(2.0, 1024, 1, (9, 2))]
    assert prefixes.ideal_hits(arrivals) == (1024 / 3584, 2 / 7)


def test_a_copy_takes_its_transfers_own_time() -> None:
    """Ten blocks of 2 MiB from an A100: 32 GB/s, and 10 us for each piece of 64 kB."""
    transfer = transfers(LLAMA_3_8B, "a100-sxm-80gb", 1 << 16)
    cost = SwapCost(cost_of(LLAMA_3_8B, "a100-sxm-80gb"), transfer)
    more = cost.seconds(StepWork(1, 1, 1, 1, swapped=10)) - cost.seconds(StepWork(1, 1, 1, 1))
    assert more == pytest.approx(10 * (1 << 21) / 32e9 + 320 * 10e-6)


def test_a_request_is_good_within_both_limits() -> None:
    served = [
        Served(0, 0.0, 0.0, 0.5, 1.5, 10, 11, 0, 0),  # 0.5 s, then 0.1 s each
        Served(1, 0.0, 0.0, 0.3, 2.3, 10, 11, 0, 0),  # 0.3 s, then 0.2 s each
        Served(2, 0.0, 0.0, 0.3, 0.3, 10, 1, 0, 0),
    ]
    assert layouts.attained(served, 0.4, 0.15) == pytest.approx(1 / 3)
    assert layouts.attained(served, 1.0, 0.25) == 1.0

"""Engines whose ranks are processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from smelt.runtime.engine.executors.torch_executor import TorchExecutor
from smelt.runtime.native.library import kernels
from smelt.runtime.parallel import launch
from smelt.runtime.requests.output import RequestOutput
from smelt.runtime.speculation.lookup_first import weights_of
from smelt.runtime.speculation.model_drafter import ModelDrafter

from ...serve_process import started
from ...tiny import SMELT_6M, make_model, save_model
from ..drive import engine
from ..random_adapter import adapter_of
from ..speculation.pretend import pretend

PROMPTS = [torch.randint(4, 4096, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 9, 33)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=5, n=3, max_tokens=12, ignore_eos=True),
    SamplingParams(beam_width=3, max_tokens=8, ignore_eos=True),
]


class Threads:
    """A model, and with how many threads it computes."""

    def __init__(self, model: Any) -> None:
        self._model, self.counts = model, set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *given: Any) -> Any:
        self.counts.add(torch.get_num_threads())
        return self._model(*given)


@pytest.fixture(scope="module", params=["tp", *(pytest.param(way, marks=pytest.mark.slow) for way in ("pp", "cp"))])
def two(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """smelt-6m on two processes."""
    found = engine(SMELT_6M, **{request.param: 2})
    yield found
    found.close()


def children(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, above = (each / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(above) == parent and state != "Z":
                found.append(int(each.name))
    return found


def until(holds: Callable[[], bool], seconds: float = 10) -> bool:
    ends = time.monotonic() + seconds
    while not holds() and time.monotonic() < ends:
        time.sleep(0.05)
    return holds()


def _forever(running: Engine) -> None:
    while True:
        running.step()


def said(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_tokens_are_the_single_processs(two: Engine) -> None:
    one = engine(SMELT_6M)
    wanted, found = one.generate(PROMPTS, PARAMS), two.generate(PROMPTS, PARAMS)
    assert said(found) == said(wanted)
    first, same = found[0].outputs[0], wanted[0].outputs[0]
    assert first.cumulative_logprob == pytest.approx(same.cumulative_logprob, abs=1e-3)
    pairs = [(prompt[:-4], prompt[-4:]) for prompt in PROMPTS]
    scores = [[each.logprob for each in group] for group in two.score(pairs)]
    assert scores == [pytest.approx([each.logprob for each in group], abs=1e-4) for group in one.score(pairs)]
    if two.config.tp == 2:
        assert two.model.nbytes() <= 0.55 * one.model.nbytes()


def test_embeddings_are_the_single_processs(two: Engine) -> None:
    # Beside requests that are running; before the thread begins that embeds, which would take steps of its own.
    two.add_request(PROMPTS[2], PARAMS[0], id="meanwhile")
    two.step()
    both = two.hidden_states([PROMPTS[1], PROMPTS[2][:9]])
    torch.testing.assert_close(both, engine(SMELT_6M).hidden_states([PROMPTS[1], PROMPTS[2][:9]]), atol=1e-3, rtol=1e-3)
    for prompts in ([], [PROMPTS[1], PROMPTS[0]], [[]], [[10**7]]):
        with pytest.raises(RuntimeProblem):
            two.hidden_states(prompts)
    while two.has_work:
        (output,) = two.step()
    assert said([output]) == said(engine(SMELT_6M).generate([PROMPTS[2]], PARAMS[0]))
    for pooling in ("last", "mean"):
        wanted, found = (asyncio.run(each.embed(PROMPTS[0], pooling=pooling)) for each in (engine(SMELT_6M), two))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_long_steps_need_a_second_message(two: Engine) -> None:
    """Of more than a thousand numbers."""
    prompts = [[7 + i] * 120 for i in range(16)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert said(two.generate(prompts, params)) == said(engine(SMELT_6M).generate(prompts, params))


def test_ranks_of_one_machine_share_memory(two: Engine) -> None:
    if kernels(lambda _: None) is None:
        pytest.skip("Smelt's compiled CPU kernels are not available here")
    assert two._workers is not None
    ranks = two._workers.place.ranks
    assert (getattr(ranks, "_memory", None) is not None) == (two.config.tp > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "branches"), [("tp", 0), ("tp", 3), ("pp", 3), ("cp", 0)])
def test_drafts_are_verified_by_all(way: str, branches: int) -> None:
    wanted = engine(SMELT_6M).generate(PROMPTS, PARAMS[0])
    two = engine(SMELT_6M, drafter="lookup", draft_tokens=4, draft_branches=branches, **{way: 2})
    pretend(two, wanted)
    try:
        assert said(two.generate(PROMPTS, PARAMS[0])) == said(wanted)
        assert two.drafting is not None
        assert two.drafting.total.all_accepted > 0
        assert (two.drafting.total.on_branch > 0) == (branches > 0)
    finally:
        two.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tp", "pp", "cp"])
@pytest.mark.parametrize("drafter", ["lookup", str(SMELT_6M)], ids=["lookup", "itself"])
def test_the_first_rank_drafts(way: str, drafter: str) -> None:
    """As many tokens as pay, which is known from steps that all ranks compute."""
    wanted = engine(SMELT_6M).generate(PROMPTS, PARAMS[:2] + PARAMS[:1])
    for more in ({}, {"draft_tokens": 3}):
        two = engine(SMELT_6M, drafter=drafter, **more, **{way: 2})
        try:
            assert said(two.generate(PROMPTS, PARAMS[:2] + PARAMS[:1])) == said(wanted)
            assert two.drafting is not None
            if more and drafter != "lookup":
                assert two.drafting.total.acceptance == 1
        finally:
            two.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [str(SMELT_6M), "early-exit:3"], ids=["whole", "divided"])
def test_while_others_wait_their_threads_draft(drafter: str) -> None:
    """Where each rank has a part of what drafts, they do not wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with contextlib.closing(engine(SMELT_6M, drafter=drafter, draft_tokens=3, tp=2)) as two:
            executor = two.executor
            assert isinstance(executor, TorchExecutor)
            weights = weights_of(two.drafter)
            assert isinstance(weights, ModelDrafter)
            drafting, verifying = Threads(weights.model), Threads(executor.model)
            weights.model, executor.model = drafting, verifying  # pyright: ignore[reportAttributeAccessIssue]
            two.generate(PROMPTS, PARAMS[0])
            assert verifying.counts == {2}
            assert drafting.counts == ({4} if drafter == str(SMELT_6M) else {2})
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_drafter_that_cannot_be_loaded_ends_all_ranks() -> None:
    before = set(children(os.getpid()))
    with pytest.raises(RuntimeProblem, match="nowhere; it must be lookup"):
        engine(SMELT_6M, drafter="nowhere", tp=2)
    assert until(lambda: set(children(os.getpid())) <= before)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tp", "cp"])
def test_preempted_sequences_come_back_from_host_memory(way: str) -> None:
    small = {"kv_cache_memory_bytes": 1 << 20, "host_cache_bytes": 1 << 24, "swap": "swap", "admission": "immediate"}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = [prompt * 2 for prompt in PROMPTS] * 2
    one, two = engine(SMELT_6M), engine(SMELT_6M, **{way: 2}, **small)
    found = two.generate(prompts, params)
    two.close()
    assert sum(output.preemptions for output in found) > 0
    assert said(found) == said(one.generate(prompts, params))


def test_a_rank_that_dies_stops_all_with_one_sentence() -> None:
    before = set(children(os.getpid()))
    running = engine(SMELT_6M, tp=2)
    (worker,) = set(children(os.getpid())) - before
    running.add_request(PROMPTS[0], PARAMS[0])
    running.step()
    os.kill(worker, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeProblem, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        _forever(running)
    assert time.monotonic() - begun < 10
    assert running.problem is not None
    with pytest.raises(RuntimeProblem, match="rank 1"):
        running.generate(PROMPTS, PARAMS[0])
    running.close()


@pytest.mark.slow
def test_a_rank_that_dies_while_it_connects_is_named() -> None:
    """torch itself would wait for it for as long as for a step, and hear no interrupt."""
    before = set(children(os.getpid()))
    with pytest.raises(
        RuntimeProblem, match=r"rank 1 \(process \d+\) has ended with exit code 3 while the ranks connected"
    ):
        launch.started("tests.runtime.parallel.dies_connecting", 2, "cpu")
    assert set(children(os.getpid())) <= before


@pytest.mark.slow
def test_closing_ends_its_processes() -> None:
    before = set(children(os.getpid()))
    running = engine(SMELT_6M, tp=2)
    assert len(set(children(os.getpid())) - before) == 1
    running.close()
    assert set(children(os.getpid())) <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tp": 5, "dtype": "float32"}, "cannot be divided between 5 ranks"),
        ({"tp": 2, "compile": True}, "are for one process"),
        ({"tp": 2, "kv_cache_memory_bytes": 1}, "the KV cache does not fit"),
        ({"tp": 0}, "tp is 0"),
        ({"pp": 2, "cp": 2}, "stages do not divide sequences"),
        ({"pp": 7}, "6 layers cannot be divided between 7 stages"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    options: dict[str, object], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(children(os.getpid()))
    with pytest.raises(RuntimeProblem, match=says):
        Engine(SMELT_6M, quiet=True, **options)
    assert set(children(os.getpid())) <= before
    assert says not in capfd.readouterr().err  # each of the other ranks would have said it once more


def test_what_needs_the_whole_model_is_refused(two: Engine, tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeProblem, match="weights cannot be taken from memory on several ranks; use an engine on one process"
    ):
        two.take_weights(None, [], lambda name: torch.empty(0))
    adapter_of(SMELT_6M, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(RuntimeProblem, match="adapters are not applied on several ranks"):
        two.load_adapter("mine", tmp_path / "adapter")


def test_a_launched_number_must_be_tp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeProblem, match="tp is 2, but 3 processes were launched"):
        Engine(SMELT_6M, tp=2, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "pp": 2},
        {"tp": 2, "cp": 2},
        {"cp": 2, "kv_cache_dtype": "int8"},
        {"tp": 2, "offload": "disk"},
        {"pp": 2, "kv_cache_dtype": "int8"},
    ],
)
def test_ways_together(options: dict[str, object]) -> None:
    running = engine(SMELT_6M, **options)
    own = {name: value for name, value in options.items() if name == "kv_cache_dtype"}
    assert said(running.generate(PROMPTS, PARAMS)) == said(engine(SMELT_6M, **own).generate(PROMPTS, PARAMS))
    running.close()


@pytest.mark.slow
def test_a_server_on_two_ranks_answers_and_leaves_nothing() -> None:
    with started("--tp", "2", ends_gently=True) as (process, url):
        body = {"prompt": PROMPTS[1], "max_tokens": 8, "temperature": 0}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        (worker,) = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    assert until(lambda: not Path(f"/proc/{worker}").exists())


@pytest.mark.slow
@pytest.mark.parametrize("which", ["worker", "server"])
def test_killed_under_load(which: str) -> None:
    """A worker's end makes the server say so; the server's end ends its worker."""
    with started("--tp", "2") as (process, url):
        (worker,) = children(process.pid)
        body = {"prompt": PROMPTS[1], "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            if which == "server":
                process.kill()
                assert until(lambda: not Path(f"/proc/{worker}").exists())
                return
            os.kill(worker, signal.SIGKILL)
            assert "error" in "".join(lines)
        assert until(lambda: httpx2.get(f"{url}/health").status_code == 503)
        assert httpx2.get(f"{url}/ready").status_code == 503
        again = httpx2.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=60)
        assert again.status_code == 500


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_others() -> None:
    """One that is stopped is there, so that no connection says that it is gone."""
    before = set(children(os.getpid()))
    running = engine(SMELT_6M, tp=2, step_timeout=1.5)
    (worker,) = set(children(os.getpid())) - before
    os.kill(worker, signal.SIGSTOP)
    said = r"a rank has not answered within 1.5 seconds \(step_timeout\), and a model on several ranks needs all; start again"
    with pytest.raises(RuntimeProblem, match=said):
        running.generate(PROMPTS, PARAMS[0])
    with pytest.raises(RuntimeProblem, match=said):
        running.generate(PROMPTS, PARAMS[0])
    assert worker not in children(os.getpid())


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "from smelt.runtime import Engine, SamplingParams\n"
        f"engine = Engine({str(SMELT_6M)!r}, tp=2, dtype='float32', quiet=True)\n"
        "params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)\n"
        f"print(engine.generate({PROMPTS[1]!r}, params)[0].outputs[0].token_ids)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    wanted = engine(SMELT_6M).generate(PROMPTS[1], params)[0].outputs[0].token_ids
    assert done.stdout.strip() == str(wanted), "of the first rank only"


@pytest.mark.slow
def test_nothing_stays_of_a_first_rank_that_was_killed(tmp_path: Path) -> None:
    """As the last of its ranks removes where they met, however soon that one notices."""
    script = (
        "import os, signal\nfrom smelt.runtime import Engine\n"
        f"engine = Engine({str(SMELT_6M)!r}, tp=2, dtype='float32', quiet=True)\n"
        f"engine.generate({PROMPTS[1]!r})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert until(lambda: not list(tmp_path.glob("smelt-ranks-*")))


_TORCHRUN = {
    "engine": (
        f"engine = Engine({str(SMELT_6M)!r}, tp=2, dtype='float32', quiet=True)\n"
        f"engine.generate({PROMPTS[1]!r}, SamplingParams(max_tokens=4))\n"
        "wait_for_idle_cores()\n"
    ),
    "training": ("together = Processes.launched('cpu')\nwait_for_idle_cores()\ntogether.sum_(torch.ones(1 << 20))\n"),
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs threads that run only while a core is idle")
@pytest.mark.parametrize("what", _TORCHRUN)
def test_ranks_that_torchrun_started_end_well_on_a_busy_machine(what: str, tmp_path: Path) -> None:
    """gloo's threads still have tensors when Python ends."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import os, torch\n"
        "from smelt.runtime import Engine, SamplingParams\n"
        "from smelt.system.processes.process_group import Processes\n"
        "def wait_for_idle_cores():\n"
        "    for thread in map(int, os.listdir('/proc/self/task')):\n"
        "        if thread != os.getpid():\n"
        "            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))\n" + _TORCHRUN[what]
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_stage_may_have_no_attention(tmp_path: Path) -> None:
    """As depth pruning leaves it: the other stage's cache decides."""
    model = make_model("llama", num_hidden_layers=4, layer_parts=["all", "all", "mlp", "mlp"])
    path = save_model(model, tmp_path)
    alone = engine(path).generate(PROMPTS, PARAMS[0])
    two = engine(path, pp=2)
    try:
        assert said(two.generate(PROMPTS, PARAMS[0])) == said(alone)
    finally:
        two.close()

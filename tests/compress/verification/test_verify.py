"""``smelt verify``: what a run claims of its checkpoint, and what becomes of the claims when something is changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from smelt.compress import Recipe, SmeltError, run
from smelt.compress.cli import app
from smelt.compress.results.report import ReportData
from smelt.compress.results.result import Change
from smelt.compress.verification.claims import Claims, MeasuredClaims, SpeedClaim
from smelt.compress.verification.finding import Finding
from smelt.compress.verification.measured import Remeasurement, check_measured
from smelt.compress.verification.verify import verify
from smelt.system.errors import RuntimeProblem
from smelt.system.storage.new_directory import RECORD
from typer.testing import CliRunner

from ..report_samples import baseline, candidate, report

Found = dict[str, Finding]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ReportData]:
    """A checkpoint of smelt-6m in 4 bits, with claims on its text and a task."""
    recipe = {
        "model": "builtin:smelt-6m",
        "output": str(tmp_path_factory.mktemp("made") / "out"),
        "calibrate": {"samples": 8, "length": 64},
        "steps": [{"quantize": {"scheme": "W4A16", "group_size": 64, "rounding": "nearest"}}],
        "evaluate": {
            "windows": 4,
            "length": 64,
            "samples": 0,
            "tasks": ["smelt_continuation"],
            "limit": 60,
            "guarantee": ["acc loss <= 30% @90%"],
            "speed": False,
        },
    }
    result = run(Recipe.model_validate(recipe))
    return result.checkpoint, result.report


@pytest.fixture
def copied(made: tuple[Path, ReportData], tmp_path: Path) -> Path:
    return shutil.copytree(made[0], tmp_path / "copy")


def test_a_checkpoint_as_it_was_made_is_confirmed(made: tuple[Path, ReportData], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", str(made[0]), "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    assert all(line.startswith("confirmed  ") for line in lines[:-2])
    said = "\n".join(lines)
    (model,) = made[1].candidates
    assert model.text is not None
    assert f"perplexity {model.text.perplexity:.2f}: here it is {model.text.perplexity:.2f}" in said
    for words in ("the files", "the logits", "KL divergence", "smelt_continuation acc ", "certified that smelt_cont"):
        assert words in said, words
    assert (tmp_path / "out" / "report.html").exists()


def test_digests_are_those_of_the_files_and_tensors(made: tuple[Path, ReportData]) -> None:
    files = Claims.read(made[0]).files
    inside = {path.name for path in made[0].iterdir()}
    assert files.keys() == inside - {RECORD, "README.md"}
    for name, claim in files.items():
        assert claim.sha256 == hashlib.sha256((made[0] / name).read_bytes()).hexdigest()
    claim = files["model.safetensors"]
    with safe_open(made[0] / "model.safetensors", "np") as file:
        assert claim.tensors.keys() == set(file.keys())
        packed = next(name for name in file.keys() if name.endswith("weight_packed"))  # noqa: SIM118
        values = file.get_tensor(packed)
    said = f"int32 {list(values.shape)}".encode()
    assert claim.tensors[packed] == hashlib.sha256(said + values.tobytes()).hexdigest()


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_a_changed_byte_is_named(copied: Path) -> None:
    weights = copied / "model.safetensors"
    header = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    entries: dict[str, Any] = json.loads(weights.read_bytes()[8:header])
    entries.pop("__metadata__", None)
    for name in list(entries)[:: len(entries) // 3]:
        begin = entries[name]["data_offsets"][0]
        _flip(weights, header + begin)
        found = _quick(copied)
        assert found["the file model.safetensors"].why == f"was changed in {name}"
        _flip(weights, header + begin)
    assert found.keys() - {"the file model.safetensors"} == {"the logits"}
    assert _quick(copied)["the files"].verdict == "confirmed"


@pytest.mark.parametrize(
    ("change", "file", "sentence"),
    [
        (lambda path: (path / "config.json").write_text("{}"), "config.json", "has 2 bytes instead of"),
        (lambda path: _flip(path / "tokenizer.json", 30), "tokenizer.json", "was changed"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json", "is missing"),
        (lambda path: (path / "modeling_x.py").write_text("x"), "modeling_x.py", "was added"),
        (lambda path: (path / "pytorch_model.bin").write_text("x"), "pytorch_model.bin", "was added"),
        (
            lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8]),
            "model.safetensors",
            "instead of",
        ),
    ],
)
def test_changed_missing_and_added_files_are_named(
    change: Callable[[Path], object], file: str, sentence: str, copied: Path
) -> None:
    change(copied)
    found = _quick(copied)[f"the file {file}"]
    assert found.verdict == "not confirmed"
    assert sentence in found.why


def test_people_may_change_the_card(copied: Path) -> None:
    (copied / "README.md").write_text("# Mine")
    assert _quick(copied)["the files"].verdict == "confirmed"


def test_a_weight_that_decides_is_seen_in_the_logits(copied: Path) -> None:
    """Scales of a whole layer: the file's digest is changed with it, as who deceives would do."""
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight_scale"))
    save_file(weights | {name: weights[name] * 3}, copied / "model.safetensors", {"format": "pt"})
    found = _quick(copied)
    assert found["the logits"].verdict == "not confirmed"


@pytest.mark.slow
def test_claims_that_are_not_so_are_not_confirmed(copied: Path, tmp_path: Path) -> None:
    def better(claims: dict[str, Any]) -> None:
        measured = claims["measured"]
        measured["text"]["perplexity"] *= 0.98
        measured["text"]["kl"] *= 0.5
        measured["tasks"][0]["value"] += 0.1
        measured["bounds"][0] |= {"claim": "acc loss <= 0.01% @95%", "limit": 0.0001, "confidence": 0.95}
        measured["settings"]["guarantee"] = ["acc loss <= 0.01% @95%"]

    _rewrite(copied, better)
    refuted = [each for each in verify(copied, output=tmp_path / "out") if each.verdict == "not confirmed"]
    (first, kl, task, bound) = refuted
    assert first.claim.startswith("perplexity")
    assert kl.claim.startswith("KL")
    assert task.claim.startswith("smelt_continuation")
    assert bound.claim.startswith("certified that smelt_continuation loses at most 0.01%")
    done = CliRunner().invoke(app, ["verify", str(copied), "--output", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 1
    assert [each["verdict"] for each in json.loads(done.stdout)].count("not confirmed") == 4


@pytest.mark.slow
def test_what_is_not_here_is_not_measurable(copied: Path, tmp_path: Path) -> None:
    def moved(claims: dict[str, Any]) -> None:
        claims["measured"]["baseline"] = "./nowhere"
        claims["measured"]["settings"] |= {"text": "./gone.txt", "tasks": ["./gone.yaml", "smelt_continuation"]}
        claims["measured"]["tasks"].append({**claims["measured"]["tasks"][0], "task": "gone"})

    _rewrite(copied, moved)
    found = {each.claim: each for each in verify(copied, output=tmp_path / "out")}
    unknown = {claim: each.why for claim, each in found.items() if each.verdict == "not measurable here"}
    assert not [each for each in found.values() if each.verdict == "not confirmed"]
    assert any("gone.txt" in why for claim, why in unknown.items() if claim.startswith("perplexity"))
    assert any("gone.yaml" in why for claim, why in unknown.items() if claim.startswith("gone"))
    assert any("--baseline" in why for claim, why in unknown.items() if claim.startswith("certified"))
    assert found[next(claim for claim in found if claim.startswith("smelt_continuation acc "))].verdict == "confirmed"


@pytest.mark.slow
def test_bounds_are_those_that_were_certified(copied: Path, tmp_path: Path) -> None:
    """A record whose numbers are not those of its claim; bounds of a text that is not here; a run that stopped early."""

    def forged(claims: dict[str, Any]) -> None:
        claims["measured"]["bounds"][0] |= {"limit": 0.0001, "confidence": 0.999}

    _rewrite(copied, forged)
    found = {each.claim: each for each in verify(copied, output=tmp_path / "a")}
    (bound,) = (each for claim, each in found.items() if claim.startswith("certified"))
    assert bound.verdict == "not confirmed"
    assert "what was certified is 'acc loss <= 30% @90%'" in bound.why

    def elsewhere(claims: dict[str, Any]) -> None:
        measured = claims["measured"]
        measured["settings"] |= {"text": "./gone.txt", "guarantee": ["kl <= 0.5 @90%"]}
        measured["bounds"] = [{"claim": "kl <= 0.5 @90%", "what": "kl", "limit": 0.5, "confidence": 0.9}]

    _rewrite(copied, elsewhere)
    found = {each.claim: each for each in verify(copied, output=tmp_path / "b")}
    (bound,) = (
        each for claim, each in found.items() if claim.startswith("certified that the KL divergence is at most")
    )
    assert bound.verdict == "not measurable here"
    assert "gone.txt" in bound.why

    def shorter(claims: dict[str, Any]) -> None:
        claims["measured"]["settings"] |= {"text": "builtin", "windows": 3, "guarantee": []}

    _rewrite(copied, shorter)
    found = {each.claim: each for each in verify(copied, output=tmp_path / "c")}
    (text,) = (each for claim, each in found.items() if claim.startswith("perplexity ") and "beside" not in claim)
    assert text.verdict == "not measurable here"
    assert "3 windows were read here, and 4 then" in text.why


def test_what_the_runtime_does_not_serve_is_not_measurable(
    made: tuple[Path, ReportData], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeProblem("the architecture X is unknown to the runtime")

    monkeypatch.setattr("smelt.compress.verification.measured.evaluate", refuse)
    found = [
        each for each in verify(made[0], output=tmp_path) if "file" not in each.claim and "logits" not in each.claim
    ]
    assert len(found) > 4
    assert {each.verdict for each in found} == {"not measurable here"}
    assert all("the architecture X" in each.why for each in found)


@pytest.mark.slow
def test_what_fails_when_it_is_measured_again_is_not_confirmed(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record could ask for something that fails, and its claims would never be looked at. What was measured before is."""

    def fail(*_: object, **__: object) -> None:
        raise SmeltError("speed of copy: the prompt is too long")

    _rewrite(copied, lambda claims: claims["measured"]["text"].update(perplexity=1.01))
    _rewrite(copied, lambda claims: claims["measured"]["settings"].update(speed={"repeats": 1}))
    monkeypatch.setattr("smelt.compress.evaluation.measure.measure_speed", fail)
    found = {each.claim: each for each in verify(copied, output=tmp_path / "out")}
    assert found["perplexity 1.01"].verdict == "not confirmed"
    assert found["what was measured"].why == "measuring it again failed: speed of copy: the prompt is too long"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(SmeltError, match="was not made by Smelt"):
        verify(copied, output=tmp_path / "mine")


def test_several_processes_are_not_started_for_a_record(made: tuple[Path, ReportData]) -> None:
    claims = Claims.read(made[0]).measured
    assert claims is not None
    claims.settings["tp"] = 5000
    plan = Remeasurement.plan(claims, None)
    assert plan.settings.tp == 1
    assert "5000 processes" in plan.lacking["speed"]


def test_code_of_the_original_is_run_only_if_it_is_named(made: tuple[Path, ReportData]) -> None:
    claims = Claims.read(made[0]).measured
    assert claims is not None
    assert Remeasurement.plan(claims, None, trust_remote_code=True).baseline is None
    named = Remeasurement.plan(claims, "builtin:smelt-6m", trust_remote_code=True)
    assert named.baseline == "builtin:smelt-6m"


def test_directories_of_what_fetched_it_are_no_part_of_it(copied: Path) -> None:
    (copied / ".cache").mkdir()
    assert _quick(copied)["the files"].verdict == "confirmed"


def test_a_record_cannot_write_lines_of_its_own() -> None:
    said = Finding("the file x\n\x1b[1Aconfirmed", "not confirmed", "is missing").sentence()
    assert said.isprintable()


def test_another_model_is_not_taken_for_the_original(made: tuple[Path, ReportData]) -> None:
    claims = Claims.read(made[0]).measured
    assert claims is not None
    assert Remeasurement.plan(claims, None).baseline == "builtin:smelt-6m"
    plan = Remeasurement.plan(claims, str(made[0]))
    assert plan.baseline is None
    assert "has other weights than the original" in plan.lacking["baseline"]


def test_a_record_does_not_allow_itself_to_run_code(made: tuple[Path, ReportData]) -> None:
    claims = Claims.read(made[0]).measured
    assert claims is not None
    claims.settings["trust_task_code"] = True
    assert not Remeasurement.plan(claims, None).settings.trust_task_code
    assert Remeasurement.plan(claims, None, trust_task_code=True).settings.trust_task_code


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda claims: claims["files"].update({"../x": {"sha256": "0", "bytes": 1}}), "no name of a file"),
        (lambda claims: claims["files"].update({"x\n\x1b[1Ay": {"sha256": "0", "bytes": 1}}), "no name of a file"),
        (
            lambda claims: claims["files"].update({"\ud800": {"sha256": "0", "bytes": 1}}),
            "no name of a file|surrogates",
        ),
        (lambda claims: claims["files"].update({"x" * 300: {"sha256": "0", "bytes": 1}}), "no name of a file"),
        (lambda claims: claims["logits"]["tokens"][0].pop(), "windows must be of one length"),
        (lambda claims: claims["logits"]["logprobs"][0].pop(), "each token but a window's first"),
        (lambda claims: claims["measured"]["text"].update(perplexity=0), "greater than 0"),
        (lambda claims: claims["measured"]["text"].update(kl=float("inf")), "finite number"),
        (lambda claims: claims["measured"]["settings"].update(speed={"repeats": 10**6}), "asks for more than"),
        (lambda claims: claims.update(files=3), r"claims\.files"),
        (lambda claims: claims["measured"]["settings"].update(windows=-1), r"settings\.windows"),
        (lambda claims: claims["logits"]["tokens"][0].__setitem__(3, 10**6), "tokens that it does not have"),
    ],
)
def test_a_record_that_is_wrong_ends_in_a_sentence(
    change: Callable[[dict[str, Any]], object], sentence: str, copied: Path, tmp_path: Path
) -> None:
    _rewrite(copied, change)
    done = CliRunner().invoke(app, ["verify", str(copied), "--output", str(tmp_path / "out")])
    assert done.exit_code == 1
    import re

    assert re.search(sentence, done.output), done.output
    assert "Traceback" not in done.output


def test_a_checkpoint_without_claims_is_refused(copied: Path) -> None:
    record = json.loads((copied / RECORD).read_text())
    del record["claims"]
    (copied / RECORD).write_text(json.dumps(record))
    with pytest.raises(SmeltError, match="claims nothing"):
        verify(copied)
    (copied / RECORD).unlink()
    with pytest.raises(SmeltError, match=r"has no smelt\.json"):
        verify(copied)


def _decode(ratio: float, bounds: tuple[float, float] | None = None) -> Change:
    return Change(ratio=ratio, interval=bounds)


@pytest.mark.parametrize(
    ("claimed", "here", "elsewhere", "verdict"),
    [
        (2.0, _decode(2.1), False, "confirmed"),
        (2.0, _decode(1.85), False, "confirmed"),
        (2.0, _decode(1.5), False, "not confirmed"),
        (2.0, _decode(1.5, (1.3, 2.05)), False, "confirmed"),
        (2.0, _decode(1.5, (1.3, 1.7)), False, "not confirmed"),
        (2.0, _decode(1.5), True, "not measurable here"),
        (2.0, _decode(2.5), True, "confirmed"),
    ],
)
def test_speed_is_judged_by_ratios_and_the_machine(
    claimed: float, here: Change, elsewhere: bool, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from smelt.compress.results.this_machine import this_machine

    model = candidate("W4A16", 4.7, 1.018, 2.9, 1.21)
    assert model.against is not None
    beside = model.against.model_copy(update={"decode": here})
    measured = report([baseline(), model.model_copy(update={"against": beside})])
    monkeypatch.setattr("smelt.compress.verification.measured.evaluate", lambda *_, **__: measured)
    machine = this_machine()
    claims = MeasuredClaims(
        settings={},
        baseline="x",
        baseline_fingerprint="",
        machine=machine.model_copy(update={"processor": "another"}) if elsewhere else machine,
        speed=SpeedClaim(decode=claimed),
    )
    plan = Remeasurement.plan(claims, None)
    found = list(check_measured(tmp_path, claims, plan, tmp_path, trust_remote_code=False, progress=False))
    assert [each.verdict for each in found] == [verdict]
    # Two intervals that overlap do not contradict each other.
    if here.interval is not None:
        spread = claims.model_copy(update={"speed": SpeedClaim(decode=claimed, intervals={"decode": (1.65, 2.4)})})
        (one,) = check_measured(tmp_path, spread, plan, tmp_path, trust_remote_code=False, progress=False)
        assert one.verdict == "confirmed"


def _rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((checkpoint / RECORD).read_text())
    change(record["claims"])
    (checkpoint / RECORD).write_text(json.dumps(record))


def _quick(checkpoint: Path) -> Found:
    return {each.claim: each for each in verify(checkpoint, output=None)}

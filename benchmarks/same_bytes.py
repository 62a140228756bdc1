"""Whether two versions of Smelt write the same checkpoints, byte for byte, and the same reports: for refactorings.

    python -m benchmarks.same_bytes --output before.json
    python -m benchmarks.same_bytes --compare before.json after.json

The first command runs each recipe below on a small model, in a process of its own and with one thread, and keeps a digest of each file, tensor and
field that came out. Given again with the same output, it does what is missing. The second says what differs.

Nothing of Smelt is imported: only its command line is used. So the same file measures other versions, too: with PYTHONPATH
at another checkout, or run as a script. What must vary (times, speeds, memory, versions, the machine) is left out of a report's digest.
Numbers on different machines differ in their last bits; compare results of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SMELT_6M = "builtin:smelt-6m"
SECONDS_ALLOWED = 1800
DIFFERENCES_SHOWN = 8
# Of the JSON files that Smelt writes: what is different each time, or on each machine.
VARYING = {"machine", "versions", "path", "speed", "memory", "prefill", "decode", "loads", "seconds"}

_TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
_MIXTURE: dict[str, Any] = _TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Random models by name: the architecture, its changes of the usual configuration, and the type of its weights.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", _TINY, "bfloat16"),
    "wide": (
        "llama",
        _TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512},
        "float32",
    ),
    "mixture": ("qwen3_moe", _MIXTURE, "bfloat16"),
    "opt": ("opt", _TINY | {"ffn_dim": 256, "word_embed_proj_dim": 128}, "float32"),
    "gemma": ("gemma2", _TINY | {"sliding_window": 16, "query_pre_attn_scalar": 32}, "bfloat16"),
    "neox": ("gpt_neox", _TINY, "float32"),
    "gpt2": ("gpt2", _TINY | {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}, "float32"),
}


@dataclass(frozen=True)
class CheckedRun:
    """A recipe, the commands that follow it, and what they publish.

    Attributes:
        recipe: what ``recipe.yaml`` says; models are named as in :data:`MODELS`.
        commands: arguments of ``smelt``, one tuple a command.
        published: patterns of directories and files whose bytes are kept, and of reports, whose fields are.
    """

    recipe: dict[str, Any]
    commands: tuple[tuple[str, ...], ...] = (("run", "recipe.yaml"),)
    published: tuple[str, ...] = ("out/checkpoint", "out/report.json")

    def then(self, *command: str, published: str) -> CheckedRun:
        """The same with one more command."""
        return CheckedRun(self.recipe, (*self.commands, command), (*self.published, published))


def recipe(model: str, *steps: dict[str, Any], **top: Any) -> CheckedRun:
    """A recipe of some steps with a short calibration and no evaluation, where ``top`` says nothing else."""
    where = model if model == SMELT_6M else f"../models/{model}"
    usual = {"output": "out", "calibrate": {"samples": 8, "length": 64}, "evaluate": False}
    return CheckedRun({"model": where, **usual, "steps": list(steps), **top})


def quantize(scheme: str, **settings: Any) -> dict[str, Any]:
    """A quantize step."""
    return {"quantize": {"scheme": scheme, **settings}}


def prune(structure: str, **settings: Any) -> dict[str, Any]:
    """A prune step."""
    return {"prune": {"structure": structure, **settings}}


def distill(**settings: Any) -> dict[str, Any]:
    """A distill step."""
    return {"distill": _SHORT | settings}


def in_block(number: int, scheme: str, **settings: Any) -> dict[str, Any]:
    """Another format for the linears of one block."""
    return {"targets": [f"re:.*layers\\.{number}\\..*"], "scheme": scheme, **settings}


_SHORT: dict[str, Any] = {"tokens": 2048, "length": 32, "batch": 8, "learning_rate": 1e-3}
_EVALUATE: dict[str, Any] = {"windows": 4, "length": 32, "samples": 1}
_QUICK = quantize("W4A16", group_size=64, rounding="gptq")

RECIPES: dict[str, CheckedRun] = {
    # Number formats.
    "integers": recipe(
        SMELT_6M,
        quantize(
            "W4A16",
            group_size=64,
            overrides=[
                in_block(1, "W8A16", group_size=-1),
                in_block(2, "W3A16", group_size=64),
                in_block(3, "W2A16", group_size=32),
                in_block(4, "W8A8"),
                in_block(5, "W4A8", group_size=64),
            ],
        ),
    ),
    "zero-points": recipe("llama", quantize("W4A16_ASYM", group_size=32, ignore=[], overrides=[in_block(1, "W4A16")])),
    "floats": recipe(
        SMELT_6M,
        quantize(
            "FP8_DYNAMIC",
            overrides=[
                in_block(1, "FP8_BLOCK"),
                in_block(2, "NVFP4A16"),
                in_block(3, "MXFP4A16"),
                in_block(4, "MXFP4"),
                in_block(5, "W4AFP8", group_size=64),
            ],
        ),
    ),
    "fixed input scales": recipe(
        SMELT_6M,
        quantize(
            "W8A8",
            inputs="static",
            kv_cache="fp8",
            overrides=[
                in_block(1, "W8A8", inputs="static_asymmetric"),
                in_block(2, "FP8"),
                in_block(3, "NVFP4"),
                in_block(4, "W4A8", group_size=64, inputs="static"),
                in_block(5, "W4A4", group_size=64),
            ],
        ),
    ),
    "head, embedding, cache": recipe(
        SMELT_6M,
        quantize(
            "W8A16",
            group_size=64,
            ignore=[],
            embeddings="int8",
            kv_cache={"dtype": "int8", "scales": "head"},
            diagnostics=2,
        ),
    ),
    # Rounding.
    "gptq, evaluated": recipe(SMELT_6M, _QUICK, evaluate=_EVALUATE | {"tasks": ["smelt_last_word"], "limit": 4}),
    "gptq, refined": recipe(
        SMELT_6M,
        quantize(
            "W2A16",
            group_size=64,
            rounding={"method": "gptq", "error_aware": 0.5, "refit_groups": True, "damping": 0.02},
            kv_cache="int4",
        ),
    ),
    "gptq, 2:4": recipe("wide", quantize("W4A16", group_size=32, rounding={"method": "gptq", "sparsity": "2:4"})),
    "hqq": recipe(
        SMELT_6M,
        quantize("W3A16", group_size=64, rounding="hqq", overrides=[in_block(1, "W4A16_ASYM", group_size=64)]),
    ),
    "signround": recipe("llama", quantize("W2A16", group_size=32, rounding={"method": "signround", "iterations": 10})),
    # Transforms.
    "awq": recipe(
        SMELT_6M,
        quantize("W4A16_ASYM", group_size=64, transforms=["awq"]),
    ),
    "clip, scale search": recipe(
        "llama",
        quantize(
            "W3A16",
            group_size=32,
            transforms=["equalize", "clip"],
            rounding={"method": "nearest", "scale_search": True},
        ),
    ),
    "smooth": recipe("opt", quantize("W8A8", inputs="static", transforms=["smooth"], rounding="gptq")),
    "rotate": recipe(
        SMELT_6M,
        quantize(
            "W4A4",
            group_size=64,
            transforms=["fold_norms", "rotate"],
            rounding={"method": "gptq", "error_aware": 0.5},
            overrides=[{"targets": ["re:.*down_proj"], "scheme": "W4A8", "group_size": 64}],
        ),
    ),
    "rotate, learned": recipe(
        "wide", quantize("W4A4", group_size=32, transforms=[{"method": "rotate", "learn": 8}, "smooth"])
    ),
    # Choices.
    "auto, fisher": recipe(
        SMELT_6M, quantize("auto", group_size=64, target={"bits": 4.25}, loss="fisher", rounding="gptq")
    ),
    "auto, kl": recipe(
        "llama",
        quantize("auto", candidates=["W2A16", "W4A16", "W8A8"], group_size=32, target={"bits": 5.5}, loss="kl"),
    ),
    "guard": recipe(
        SMELT_6M,
        quantize("W2A16", group_size=64, guard={"max_layer_error": 0.3, "otherwise": "fallback", "fallback": "W8A16"}),
    ),
    "experts, gptq": recipe("mixture", quantize("W4A16", group_size=32, rounding="gptq")),
    "rotate, mean kept": recipe("neox", quantize("W8A8", transforms=["rotate"], rounding="gptq")),
    "norms behind": recipe("gemma", quantize("W4A16", group_size=32, transforms=["awq"], rounding="gptq")),
    "self-written text": recipe(SMELT_6M, _QUICK, calibrate={"source": "self", "samples": 8, "length": 64}),
    # Pruning.
    "sparsegpt, 2:4": recipe(SMELT_6M, prune("2:4", update="sparsegpt"), _QUICK),
    "wanda, owl": recipe(SMELT_6M, prune("weights", score="wanda", sparsity=0.5, allocation="owl")),
    "magnitude, sensitivity": recipe(
        "mixture", prune("weights", score="magnitude", sparsity=0.3, allocation="sensitivity")
    ),
    "blocks": recipe(
        SMELT_6M,
        prune("blocks", score="loss", count=1),
        prune("blocks", score="influence", count=1, update="merge"),
        prune("blocks", keep=[0, 1, 3]),
    ),
    "parts of blocks": recipe(
        SMELT_6M, prune("attention", score="influence", count=1), prune("mlp", score="loss", count=1)
    ),
    "channels and heads": recipe(
        "wide",
        prune("ffn", score="taylor", ratio=0.25, update="least_squares", guard={"max_layer_error": 0.3}),
        prune("heads", score="activation", count=4, update="least_squares"),
        prune("ffn", score="wanda", size=256),
    ),
    "channels and heads, uneven": recipe(
        SMELT_6M,
        prune("ffn", score="wanda", ratio=0.3, allocation="sensitivity", update="least_squares"),
        prune("heads", score="path", count=4, allocation="sensitivity"),
    ),
    "hidden": recipe(
        SMELT_6M,
        prune("hidden", score="pca", ratio=0.25),
        prune("hidden", score="activation", size=128),
    ),
    "transposed weights, pruned": recipe(
        "gpt2", prune("ffn", score="activation", ratio=0.25), prune("blocks", count=1), prune("4:8", score="wanda")
    ),
    "experts, pruned": recipe(
        "mixture",
        prune("experts", score="activation", count=1),
        prune("experts", score="taylor", count=1),
        prune("ffn", score="weight", ratio=0.5),
    ),
    "experts, pruned and quantized": recipe(
        "mixture", prune("experts", score="frequency", ratio=0.5), quantize("FP8_DYNAMIC")
    ),
    "vocabulary": recipe(
        SMELT_6M, prune("vocabulary", corpus="builtin"), quantize("W8A16", group_size=64, ignore=[], embeddings="int8")
    ),
    "shape": recipe("llama", prune("auto", target={"params": 0.8}), quantize("W8A16", group_size=32)),
    # Training.
    "distill": recipe(
        SMELT_6M,
        prune("blocks", score="influence", count=2),
        distill(hidden=1.0, attention=1.0, cross_entropy=0.2, schedule="wsd"),
        evaluate=_EVALUATE,
    ),
    "distill, stored": recipe(
        "wide",
        prune("hidden", score="taylor", ratio=0.25),
        distill(stored=16, small_states=True, average=0.9, student="random", accumulate=2, checkpointing=True),
    ),
    "distill, on its own text": recipe(
        SMELT_6M,
        prune("ffn", score="activation", ratio=0.5),
        distill(loss="reverse_kl", data={"source": "builtin", "writer": "student", "share": 0.5, "prompt": 8}),
        distill(loss={"method": "jsd", "beta": 0.3}, data={"source": "builtin", "writer": "teacher", "prompt": 8}),
    ),
    "train": recipe(
        SMELT_6M, quantize("W2A16", group_size=64, rounding="gptq", train={**_SHORT, "loss": "forward_kl"})
    ),
    "train, lora": recipe(
        "llama",
        quantize(
            "W4A8",
            transforms=["awq"],
            kv_cache="int8",
            group_size=32,
            train={**_SHORT, "lora": 4, "loss": "total_variation"},
        ),
    ),
    # Several steps, adapters, exports, sweeps.
    "prune, distill, quantize": recipe(
        SMELT_6M,
        prune("blocks", score="influence", count=1),
        prune("2:4", update="sparsegpt"),
        distill(),
        _QUICK,
    ),
    "adapter": recipe(SMELT_6M, _QUICK, adapter="../models/adapter").then(
        "merge", "out", "--adapter", "../models/adapter", "--output", "merged", published="merged"
    ),
    "exports": recipe(SMELT_6M, _QUICK)
    .then("export", "out", "--to", "gptq", "--output", "gptq", published="gptq")
    .then("export", "out", "--to", "awq", "--output", "awq", published="awq")
    .then("export", "out", "--to", "gguf", "--output", "model.gguf", published="model.gguf")
    .then("export", "out", "--to", "dense", "--output", "dense", published="dense"),
    "sweep": CheckedRun(
        # A sweep writes a directory's whole path into its trials' recipes, which would differ; a builtin model has none.
        recipe(
            SMELT_6M,
            quantize("W4A16", group_size=64),
            evaluate=_EVALUATE,
            sweep={"grid": {"steps.0.quantize.rounding": ["nearest", "gptq"]}},
        ).recipe,
        (("sweep", "recipe.yaml"),),
        ("out/**/checkpoint", "out/report.json"),
    ),
}


def main() -> int:
    """Run what is asked for, or compare two results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the digests go")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(RECIPES), help="run these recipes alone")
    parser.add_argument("--scratch", type=Path, help="keep what is written in this directory")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="say what differs between two outputs")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*(json.loads(path.read_text()) for path in arguments.compare))
    if arguments.output is None:
        parser.error("--output or --compare is needed")
    names = arguments.only or list(RECIPES)
    if arguments.scratch is not None:
        return run_all(names, arguments.output, arguments.scratch.resolve())
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as scratch:
        return run_all(names, arguments.output, Path(scratch))


# --- Running -----------------------------------------------------------------------------------------------------


def run_all(names: list[str], output: Path, scratch: Path) -> int:
    """Run recipes that have no result yet, and keep the results; returns 1 if one failed."""
    environment = _environment(scratch)
    origin = _origin(scratch, environment)
    found: dict[str, Any] = {"origin": origin, "results": {}}
    if output.exists():
        found = json.loads(output.read_text())
        if found["origin"] != origin:
            sys.exit(f"{output} is of {found['origin']}, and this is {origin}: choose another output")
    results: dict[str, dict[str, Any]] = found["results"]
    print(f"Smelt of {origin['smelt']}", flush=True)
    made: set[str] = set()
    for name in names:
        job = RECIPES[name]
        model = Path(job.recipe["model"]).name
        asked = digest([asdict(job), MODELS.get(model)])
        kept = results.get(name)
        if kept is None or kept["asked"] != asked or kept["error"] is not None:
            if model in MODELS.keys() - made:
                make_model(scratch / "models" / model)
                made.add(model)
            if "adapter" in job.recipe:
                make_adapter(scratch / "models" / "adapter")
            results[name] = {"asked": asked, **run_job(job, scratch / name.replace(" ", "_"), environment)}
            _write(output, found)
            done = results[name]
            said = done["error"] or f"{len(done['files'])} files"
            print(f"{name}: {said}, {done['seconds']:.0f} s, of the processor {done['cpu_seconds']:.0f} s", flush=True)
    return int(any(results[name]["error"] is not None for name in names))


def _write(output: Path, found: dict[str, Any]) -> None:
    """All or nothing, so that whoever interrupts a run loses no result."""
    partial = output.with_name(output.name + ".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(output)


def run_job(job: CheckedRun, directory: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a job's commands in a fresh directory: how long it took, its last error, and the digests of its files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / "recipe.yaml").write_text(json.dumps(job.recipe, indent=1))  # JSON is YAML
    begun, cpu_begun = time.perf_counter(), _cpu_seconds()
    error = None
    for command in job.commands:
        error = error or _error_of([sys.executable, "-m", "smelt.compress", *command], directory, environment)
    taken = {"seconds": time.perf_counter() - begun, "cpu_seconds": _cpu_seconds() - cpu_begun}
    return {**taken, "error": error, "files": {} if error else digests(directory, job.published)}


def _cpu_seconds() -> float:
    """What the processes that have ended took of the processor."""
    times = os.times()
    return times.children_user + times.children_system


def _error_of(command: list[str], directory: Path, environment: dict[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_ALLOWED,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {SECONDS_ALLOWED} s"
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return (said or [f"exit status {done.returncode}"])[-1] if done.returncode else None


def _environment(scratch: Path) -> dict[str, str]:
    """One thread, no network, no GPU; and a new cache, or what one version measured would be read by another."""
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }


_FIND = "import importlib.util as u; s = u.find_spec('smelt'); print(*(s and s.submodule_search_locations or [])[:1])"


def _origin(scratch: Path, environment: dict[str, str]) -> dict[str, str]:
    """Which Smelt the processes import, and what else decides its bytes."""
    import torch

    def said_by(*command: str) -> str:
        done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    scratch.mkdir(parents=True, exist_ok=True)
    place = said_by(sys.executable, "-c", _FIND)
    if not place:
        sys.exit("no package smelt: install it, or let PYTHONPATH name the directory that holds it")
    commit, changes = said_by("git", "-C", place, "describe", "--always"), said_by("git", "-C", place, "diff", "HEAD")
    if changes:
        commit += f" and changes {digest(changes)}"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "compressed-tensors")}
    vectors = torch.backends.cpu.get_cpu_capability()
    where = {"smelt": str(Path(place).resolve()), "commit": commit}
    return where | {"python": platform.python_version(), "vectors": vectors} | versions


# --- Models ------------------------------------------------------------------------------------------------------


def make_model(directory: Path) -> None:
    """Write the random model that the directory is named after, from a seed that its name gives."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    architecture, settings, dtype = MODELS[directory.name]
    torch.manual_seed(int(digest(directory.name), 16))
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    # Several files, as large models have them.
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size="400KB")
    _tokenizer().save_pretrained(directory)


def _tokenizer() -> Any:
    """Of bytes: each is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<pad>")


def make_adapter(directory: Path) -> None:
    """Write a LoRA adapter on two linears of each of smelt-6m's blocks, as peft saves them."""
    import torch
    from safetensors.torch import save_file

    rank, blocks, shapes = 4, 6, {"self_attn.q_proj": (256, 256), "mlp.down_proj": (256, 768)}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for block in range(blocks):
        for module, (rows, columns) in shapes.items():
            name = f"base_model.model.model.layers.{block}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.05
            tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.05
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": SMELT_6M,
        "r": rank,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in shapes],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=1))


# --- Digests -----------------------------------------------------------------------------------------------------


def digest(data: Any) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def digests(directory: Path, published: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of all files in the directories, and of the files, that ``published`` names."""
    roots = [path for pattern in published for path in sorted(directory.glob(pattern))]
    files = [
        file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*"))) if file.is_file()
    ]
    return {str(file.relative_to(directory)): file_digest(file) for file in files}


def file_digest(file: Path) -> dict[str, Any]:
    """The SHA-256 of a file, and the digests of its parts: of tensors, or of JSON's fields.

    A report's bytes vary with what it says of time and machine, so it has only those of the other fields.
    """
    found: dict[str, Any] = {}
    if file.name != "report.json":
        found["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    if file.suffix == ".safetensors":
        found["parts"] = dict(tensor_digests(file))
    elif file.suffix == ".json" and file.name != "tokenizer.json":  # which has a field for each token
        found["parts"] = field_digests(json.loads(file.read_text()))
    return found


def tensor_digests(file: Path) -> Iterator[tuple[str, str]]:
    """Each tensor's name, and its type, shape and SHA-256, from the file as it is."""
    content = memoryview(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    for name, info in json.loads(bytes(content[8:begin])).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            data = hashlib.sha256(content[begin + first : begin + last]).hexdigest()
            yield name, f"{info['dtype']} {info['shape']} {data}"


def field_digests(data: Any) -> dict[str, str]:
    """The digest of each field's values, fields named like ``models[].layers[].error``; without those that vary."""
    values: dict[str, list[Any]] = {}

    def visit(at: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, each in value.items():
                if name not in VARYING:
                    visit(f"{at}.{name}" if at else name, each)
        elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
            for each in value:
                visit(f"{at}[]", each)
            values.setdefault(f"{at}[]", []).append(len(value))
        else:
            values.setdefault(at, []).append(value)

    visit("", data)
    return {name: digest(each) for name, each in values.items()}


# --- Comparing ---------------------------------------------------------------------------------------------------


def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Print a line for each recipe; returns 1 if anything differs."""
    for name in sorted(one["origin"].keys() - {"smelt", "commit"}):
        if one["origin"][name] != other["origin"].get(name):
            print(f"note: {name} {one['origin'][name]} and {other['origin'].get(name)}")
    print(f"{one['origin']['commit']} and {other['origin']['commit']}:")
    failed = 0
    for name in dict.fromkeys([*one["results"], *other["results"]]):
        found = differences(one["results"].get(name), other["results"].get(name))
        print(f"{name}: {'; '.join(found) or 'same'}")
        failed += bool(found)
    return int(failed > 0)


def differences(one: dict[str, Any] | None, other: dict[str, Any] | None) -> list[str]:
    """What differs between two results of a recipe, in words."""
    if one is None or other is None:
        return [f"only in the {'second' if one is None else 'first'}"]
    if one["error"] or other["error"]:
        sides = (("first", one), ("second", other))
        return [f"failed in the {side}: {result['error']}" for side, result in sides if result["error"]]
    found = ["not the same recipe"] if one["asked"] != other["asked"] else []
    for name in sorted(one["files"].keys() | other["files"].keys()):
        mine, theirs = one["files"].get(name), other["files"].get(name)
        if mine is None or theirs is None:
            found.append(f"{name} only in the {'second' if mine is None else 'first'}")
        elif mine != theirs:
            found.append(f"{name} ({_named(mine.get('parts', {}), theirs.get('parts', {}))})")
    return found


def _named(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Which parts of a file differ; the first of many."""
    names = [name for name in [*mine, *(theirs.keys() - mine.keys())] if mine.get(name) != theirs.get(name)]
    if not names:
        return "its bytes" if not mine else "its parts are the same, but not its bytes"
    more = len(names) - DIFFERENCES_SHOWN
    return ", ".join(names[:DIFFERENCES_SHOWN]) + (f" and {more} more" if more > 0 else "")


if __name__ == "__main__":
    sys.exit(main())

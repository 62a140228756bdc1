"""What is run: recipes over all steps, and the commands that follow them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .models import SMELT_6M


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

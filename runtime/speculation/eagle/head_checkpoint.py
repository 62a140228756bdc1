"""A draft head's directory, in the layouts that vLLM reads: EAGLE-3's own, and that of its library speculators."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....models.checkpoint.weights import CheckpointWeights
from ....models.directory.config_checks import config_problem, raw_problem
from ....system.errors import RuntimeProblem, SmeltError
from ....system.storage.files import read_json
from ...decoder.architectures import DecoderSpec, Names, spec_of
from ...weights.checkpoint import Checkpoint

# How many of the model's layers leave states for it.
STATES = 3
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_MARKS = ("draft_vocab_size", "eagle_config", _LAYERS, "speculators_model_type")
_PARTS = (
    "fc|norm|input_norm|fc_norm[.][0-2]|lm_head|embed_tokens|d2t|t2d|verifier_(norm|lm_head)"
    "|(midlayer|layers[.]0)[.](hidden_norm|input_layernorm|post_attention_layernorm|self_attn[.][qkvo]_proj|mlp[.](gate|up|down)_proj)"
)
_KNOWN = re.compile(rf"({_PARTS})([.].+)?|.*rotary_emb[.]inv_freq")


def is_head(path: Path) -> bool:
    """Whether a directory holds a draft head instead of a model."""
    try:
        data = read_json(path / "config.json", "a configuration")
    except (OSError, SmeltError):
        return False  # whoever opens it as a model says what is wrong
    names = data.get("architectures")
    named = isinstance(names, list) and any(isinstance(name, str) and "eagle3" in name.lower() for name in names)
    return named or any(name in data for name in _MARKS)


@dataclass(frozen=True)
class HeadSettings:
    """What a draft head's configuration says besides its layer's sizes.

    Attributes:
        after: after how many of the model's layers each of the states is taken; None for EAGLE-3's own choice.
        norms_first: whether the normed states are what the layer's outputs are added to.
        norms_all: whether the model's states are normed together before they are fused.
        norms_each: whether each of them is (EAGLE-3.1).
        norms_outputs: whether a draft goes on with normed states (EAGLE-3.1).
    """

    after: tuple[int, ...] | None
    norms_first: bool
    norms_all: bool
    norms_each: bool
    norms_outputs: bool

    def layers(self, count: int) -> tuple[int, ...]:
        """After how many layers of a model of ``count`` layers."""
        return self.after or (2, count // 2, count - 3)


class HeadCheckpoint(Checkpoint):
    """A draft head's directory, checked.

    Attributes:
        settings: what its configuration says besides sizes.
        config: of a Llama with its one layer.

    Raises:
        SmeltError: it is damaged, or a head of another kind.
    """

    settings: HeadSettings

    def _open_weights(self) -> CheckpointWeights:
        return CheckpointWeights(self.path)  # their names are heads'

    def _read_config(self) -> tuple[Any, Any]:
        from transformers import LlamaConfig

        path = self.path / "config.json"
        data = read_json(path, "a draft head's configuration")
        kind = data.get("speculators_model_type", "eagle3")
        if kind != "eagle3":
            raise RuntimeProblem(f"{path}: it is a speculator of the kind {kind}; draft heads must be eagle3")
        layer = data.get("transformer_layer_config", data)
        if not isinstance(layer, dict):
            raise RuntimeProblem(f"{path}: transformer_layer_config must be an object; download the head again")
        # Some heads name no kind: they are Llama layers, whatever they draft for.
        flat = {**layer, "model_type": layer.get("model_type", "llama")}
        problem = raw_problem({**flat, "quantization_config": data.get("quantization_config")})
        if problem:
            raise RuntimeProblem(f"{path}: {problem}; fix it, or download it again")
        if flat["model_type"] != "llama":
            raise RuntimeProblem(
                f"{path}: its layer is of the kind {flat['model_type']}; draft heads must be Llama layers"
            )
        size = data.get("draft_vocab_size") or flat.get("vocab_size")
        eagle = data.get("eagle_config") or {}
        if isinstance(eagle, dict) and eagle.get("use_aux_hidden_state") is False:
            raise RuntimeProblem(
                f"{path}: it reads the last layer's states alone, as EAGLE and EAGLE-2 do; draft heads must be of EAGLE-3"
            )
        # Two conventions: vLLM's numbers are of the layers that read the states, SGLang's, within eagle_config, of those that leave them.
        # An empty list is none: the authors' own choice.
        after, shift = data.get(_LAYERS) or None, 0
        if after is None and isinstance(eagle, dict):
            after, shift = eagle.get(_LAYERS) or None, 1
        ids = isinstance(after, list) and all(type(each) is int and each >= 0 for each in after)
        if not (after is None or (ids and len(after) == STATES)) or not isinstance(size, int) or size < 1:
            raise RuntimeProblem(
                f"{path}: {_LAYERS} must list {STATES} layers, and draft_vocab_size must be a number of tokens; fix it, or download it"
                " again"
            )
        within: dict[str, Any] = eagle if isinstance(eagle, dict) else {}

        def is_set(name: str, default: object = False) -> bool:
            return bool(within.get(name, data.get(name, default)))

        self.settings = HeadSettings(
            None if after is None else tuple(each + shift for each in after),
            is_set("norm_before_residual", "transformer_layer_config" in data),
            is_set("norm_before_fc"),
            is_set("fc_norm"),
            is_set("norm_output"),
        )
        scale = data.get("logit_scale", 1.0)
        if scale != 1.0:
            raise RuntimeProblem(
                f"{path}: logit_scale is {scale}; draft heads whose logits are scaled are not supported"
            )
        try:
            config = LlamaConfig.from_dict({**flat, "vocab_size": size, "tie_word_embeddings": False})
        except Exception as error:  # transformers computes with the file's values
            first = " ".join(str(error).split())[:200]
            raise RuntimeProblem(f"{path}: transformers cannot read its Llama layer ({first})") from None
        problem = config_problem(config)
        if problem:
            raise RuntimeProblem(f"{path}: {problem}; fix it, or download it again")
        if config.num_hidden_layers != 1:
            raise RuntimeProblem(
                f"{path}: it has {config.num_hidden_layers} layers; draft heads of one layer are supported"
            )
        return config, data.get("quantization_config")

    @property
    def spec(self) -> DecoderSpec:
        """Its layer as a decoder of one layer."""
        unknown = next((name for name in self.weights.names() if not _KNOWN.fullmatch(name)), None)
        if unknown is not None:
            raise RuntimeProblem(
                f"{self.path}: has {unknown}, which draft heads of EAGLE-3 do not have; use a head of that kind"
            )
        for name, is_set in (("input_norm", self.settings.norms_all), ("fc_norm.0", self.settings.norms_each)):
            if self.weights.has(f"{name}.weight") and not is_set:
                flag = "norm_before_fc" if name == "input_norm" else "fc_norm"
                raise RuntimeProblem(
                    f"{self.path}: has {name}.weight, but {flag} is not set in config.json; the two do not match"
                )
        prefix = "midlayer." if any(name.startswith("midlayer.") for name in self.weights.names()) else "layers.0."
        names = Names(
            layer=prefix,
            embedding="embed_tokens",
            final_norm="norm",
            before_attention=None if self.settings.norms_first else "hidden_norm",
        )
        spec = spec_of(self.config)
        layers = tuple(replace(each, joined=True) for each in spec.layers)
        return replace(spec, names=names, layers=layers)

    def check(self) -> None:
        """Check what kernels read unseen: the lengths of norms and biases, and its feed-forward part. Other shapes are checked as they are read."""
        hidden, inner, states = self.config.hidden_size, self.config.intermediate_size, self._sizes("fc")[1]
        mlp = f"{self.spec.names.layer}mlp."
        for name, size in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            found = self._sizes(mlp + name)
            if found != size:
                raise self._misshapen(mlp + name, found, size)
        for name in self.weights.names():
            part, _, kind = name.rpartition(".")
            length = None
            if kind == "bias":
                length = self._sizes(part)[0]
            elif part == "input_norm":
                length = states
            elif part.startswith("fc_norm."):
                length = states // STATES
            elif part.endswith("norm") and not part.startswith("verifier"):
                length = hidden
            if length is not None and self.shape(name) != (length,):
                raise self._misshapen(name, self.shape(name), (length,))

    def _sizes(self, name: str) -> tuple[int, int]:
        if not self.has_matrix(name):
            raise RuntimeProblem(f"{self.path}: the draft head lacks {name}.weight; download it again")
        layout = self.layout(name)
        return layout.rows, layout.columns

    def _misshapen(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> RuntimeProblem:
        return RuntimeProblem(
            f"{self.path}: {name} has the shape {list(found)}, and must have {list(wanted)}; download the head again"
        )

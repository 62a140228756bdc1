"""A model directory: its configuration and its tokenizer; what Smelt must not or cannot open is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...system.errors import SmeltError, in_one_line
from ...system.storage.digests import digest, file_digest
from ...system.storage.files import check_regular, read_json
from ...system.storage.new_directory import RECORD
from ..checkpoint.weights import CheckpointWeights
from .config_checks import config_problem, is_token_id, raw_problem
from .layer_sizes import LAYER_SIZES

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


_TOKENIZER_JSON = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_COMPANIONS = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_READ = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken", ".py")


@dataclass(frozen=True)
class ModelDirectory:
    """A Hugging Face model on this disk.

    Attributes:
        name: what the recipe called it.
        path: where its files are.
        trust_remote_code: whether Python code that comes with it may run.
        as_dense: whether to treat a quantized checkpoint as the dense model that its weights represent.
        changes: fields of ``config.json`` to override.
    """

    name: str
    path: Path
    trust_remote_code: bool = False
    as_dense: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def changed(self, fields: Mapping[str, Any]) -> ModelDirectory:
        """The same with other fields of ``config.json``."""
        return replace(self, changes={**self.changes, **fields})

    def record(self) -> dict[str, Any]:
        """``smelt.json`` of a checkpoint that Smelt made: how; empty for others.

        Raises:
            SmeltError: it is damaged.
        """
        path = self.path / RECORD
        if not path.exists():
            return {}
        try:
            return read_json(path, "how Smelt made a checkpoint")
        except SmeltError:
            raise SmeltError(f"{path}: cannot be understood; the checkpoint was changed after it was made") from None

    def companions(self) -> str:
        """A digest of all small files that affect what the model says: its config, tokenizer, template, generation config and code."""
        files = sorted(path for path in self.path.iterdir() if path.suffix in _COMPANIONS and path.is_file())
        return digest([[path.name, file_digest(path)] for path in files if path.name != RECORD])

    def config_data(self) -> dict[str, Any]:
        """``config.json`` with its changes; without its ``quantization_config`` if it is treated as dense.

        Raises:
            SmeltError: it is missing, damaged or invalid.
        """
        self._check_files()
        path = self.path / "config.json"
        if not path.exists():
            raise SmeltError(f"{self.path}: has no config.json, so it is not a Hugging Face model; check the path")
        data = read_json(path, "a model configuration")
        problem = raw_problem(data)
        if problem:
            raise SmeltError(f"{path}: {problem}; fix it, or download it again")
        data |= self.changes
        # A change cannot remove a field, but blocks may have become alike.
        left_out = {name for name in (LAYER_SIZES,) if name in data and data[name] is None}
        if self.as_dense:
            left_out.add("quantization_config")
        return {name: value for name, value in data.items() if name not in left_out}

    def config(self) -> PretrainedConfig:
        """The model's configuration, once it is known to be a causal LM that may be opened.

        Raises:
            SmeltError: it is not, or transformers cannot open it.
        """
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        data = self.config_data()
        self._refuse_remote_code(data)
        try:
            config = AutoConfig.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
            if self.changes:
                config = type(config).from_dict(data)
            problem = config_problem(config)
        except Exception as error:  # each family's code computes with the file's values
            kind = data.get("model_type")
            raise SmeltError(
                f"{self.path}/config.json: transformers cannot open model_type {kind!r} ({in_one_line(error)})"
            ) from None
        if problem:
            raise SmeltError(f"{self.path}/config.json: {problem}; fix it, or download it again")
        if self.as_dense and hasattr(config, "quantization_config"):
            delattr(config, "quantization_config")
        names = data.get("architectures") or []
        if config.is_encoder_decoder or any("Seq2Seq" in n or n.endswith("ForConditionalGeneration") for n in names):
            raise SmeltError(
                f"{self.path}: {names or config.model_type} is not a decoder-only language model; Smelt compresses only those"
            )
        encoder = names and not any(n.endswith(("ForCausalLM", "LMHeadModel")) or "CausalLM" in n for n in names)
        if encoder or (type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not self.trust_remote_code):
            raise SmeltError(
                f"{self.path}: {names[0] if names else config.model_type} is not a causal language model"
                " (an encoder, perhaps); Smelt compresses decoder-only models, named …ForCausalLM"
            )
        return config

    def check_weights(self, config: PretrainedConfig, weights: CheckpointWeights) -> None:
        """Check that the directory's tensors are those that its configuration requires.

        Args:
            config: what :meth:`config` gave.
            weights: the directory's.

        Raises:
            SmeltError: they belong to another model; one line for each tensor that does not fit.
        """
        from .agreement import check_agreement

        stored = self.config_data().get("quantization_config")
        try:
            check_agreement(config, weights, stored, trust_remote_code=self.trust_remote_code)
        except SmeltError as error:
            raise SmeltError("\n".join(self._named(line) for line in str(error).split("\n"))) from None

    def end_tokens(self, config: Any) -> list[int]:
        """The tokens that end a text: those of ``generation_config.json``, which knows all of them, or of ``config``.

        Raises:
            SmeltError: the file is invalid.
        """
        found = getattr(config, "eos_token_id", None)
        path = self.path / "generation_config.json"
        if path.exists():
            found = self._generation_data(path).get("eos_token_id", found)
        return [] if found is None else found if isinstance(found, list) else [found]

    def sampling_defaults(self) -> dict[str, float]:
        """What ``generation_config.json`` says of how tokens are chosen; empty if there is none.

        Raises:
            SmeltError: it is damaged or invalid.
        """
        path = self.path / "generation_config.json"
        data = self._generation_data(path) if path.exists() else {}
        found = {name: data[name] for name in _SAMPLING if data.get(name) is not None}
        wrong = next((name for name, value in found.items() if type(value) not in (int, float) or value != value), None)
        if wrong is not None:
            raise SmeltError(f"{path}: {wrong} is {found[wrong]!r}, not a number; fix or remove the file")
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer."""
        return any((self.path / name).exists() for name in _TOKENIZER_FILES)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer.

        Raises:
            SmeltError: there is none, or a file of it is damaged; the sentence names it.
        """
        from transformers import AutoTokenizer

        self._check_files()
        if not self.has_tokenizer:
            raise SmeltError(f"{self.path}: has no tokenizer; add tokenizer.json")
        try:
            found = AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
            found("a")  # some wrong settings load, and fail at the first text
            return found
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # tokenizers raise bare Exception on bad files, and panic on some
            self.check_tokenizer_files()
            there = ", ".join(name for name in _TOKENIZER_FILES if (self.path / name).exists())
            raise SmeltError(
                f"{self.path}: its tokenizer cannot be loaded ({in_one_line(error)}); {there} are damaged or do not belong together,"
                " download them again"
            ) from None

    def check_tokenizer_files(self) -> None:
        """Check that the tokenizer's existing files are JSON, without loading it.

        Raises:
            SmeltError: one is not.
        """
        for name in _TOKENIZER_JSON:
            if (self.path / name).exists():
                read_json(self.path / name, "a tokenizer file")

    def check_generation(self) -> None:
        """Check that transformers can parse ``generation_config.json``, if there is one.

        Raises:
            SmeltError: it is not.
        """
        path = self.path / "generation_config.json"
        if path.exists():
            self._generation_data(path)

    def _generation_data(self, path: Path) -> dict[str, Any]:
        data = read_json(path, "generation settings")
        bad = next(
            (name for name, value in data.items() if name.endswith("os_token_id") and not is_token_id(value)), None
        )
        if bad:
            raise SmeltError(f"{path}: {bad} is {data[bad]!r}, not a token id; fix or remove the file")
        from transformers import GenerationConfig

        try:
            GenerationConfig.from_dict(data)
        except Exception as error:  # its comparisons of the file's values can raise anything
            raise SmeltError(
                f"{path}: is not a valid generation config ({in_one_line(error)}); fix or remove the file"
            ) from None
        return data

    def _check_files(self) -> None:
        """Refuse FIFOs and devices, which would block or never end, in place of a model's files."""
        for path in (*self.path.glob("*"), *self.path.glob("*/*.jinja")):
            if path.suffix in _READ and path.exists() and not path.is_dir():
                check_regular(path)

    def _named(self, line: str) -> str:
        return line if line.startswith(str(self.path)) else f"{self.path}: {line}"

    def _refuse_remote_code(self, data: dict[str, Any]) -> None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore

        if data.get("auto_map") and data.get("model_type") not in CONFIG_MAPPING_NAMES and not self.trust_remote_code:
            raise SmeltError(
                f"{self.path}: needs the Python code shipped with the model, which does not run by default;"
                " review that code, then set trust_remote_code: true"
            )

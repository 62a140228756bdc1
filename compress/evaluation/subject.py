"""A checkpoint to be measured, or a model behind a server, and what is known of it without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...models.checkpoint.weights import CheckpointWeights
from ...models.directory.directory import ModelDirectory
from ...models.directory.find import find_checkpoint
from ...models.directory.inspection import inspect
from ...system.errors import RuntimeProblem, SmeltError
from ...system.storage.digests import digest
from ..loaders.facts import facts_of_checkpoint
from ..loaders.rules import loaders
from ..results.result import Layer, Loader, ModelResult, Size, TrainingRecord
from .scoring.text import TextReader

if TYPE_CHECKING:
    from .scoring.on_server import RemoteModel

# From the directory where activations may be kept to a text reader and its name.
OpenReader = Callable[[Path], tuple[TextReader, str]]


@dataclass
class Subject:
    """One checkpoint, or one model behind a server.

    Attributes:
        name: shown in reports; unique within an evaluation.
        directory: where it is; of a server, where the tokenizer is.
        role: whether others are compared with it.
        open_reader: opens a text reader, if not the runtime's.
        only_text: why it cannot be served, so that only text is read with it.
        merged: a digest of what is merged into it when read, which its directory does not hold.
        server: where it is instead of in the directory.
    """

    name: str
    directory: ModelDirectory
    role: Literal["baseline", "candidate"]
    open_reader: OpenReader | None = None
    only_text: str | None = None
    warnings: list[str] = field(default_factory=list)
    merged: str | None = None
    server: RemoteModel | None = None

    @property
    def reads(self) -> bool:
        """Whether it gives log probabilities of texts."""
        return self.server is None or self.server.no_scores is None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of every byte of its weights, and of what is merged in."""
        if self.server is not None:
            return self.server.fingerprint
        stored = CheckpointWeights(self.directory.path).content_digest()
        return stored if self.merged is None else digest([stored, self.merged])

    @cached_property
    def companions(self) -> str:
        """A digest of all small files that affect its output: its config, tokenizer, template and generation config."""
        return self.directory.companions()

    @cached_property
    def made(self) -> dict[str, Any]:
        """Smelt's record in a checkpoint it made; empty for others."""
        return self.directory.record()

    @property
    def _layers(self) -> list[dict[str, Any]]:
        """The linears as left by the last step that changed any."""
        of_steps: list[list[dict[str, Any]]] = [step["layers"] for step in self.made.get("steps", [])]
        return next((layers for layers in reversed(of_steps) if layers), [])

    @property
    def bytes(self) -> int:
        """Of its tensors."""
        return self._inspection.bytes

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.directory.tokenizer()

    def described(self) -> ModelResult:
        """Its part of the report that needs no run."""
        if self.server is not None:
            info = self.server.info
            return ModelResult(
                name=self.name,
                role=self.role,
                path=info.url,
                fingerprint=self.fingerprint,
                scheme=f"served by {info.full_name}",
            )
        found = self._inspection
        quantized = [group for group in found.groups if " " in group.scheme]
        linear = sum(group.numel for group in quantized)
        return ModelResult(
            name=self.name,
            role=self.role,
            path=self.directory.name,
            fingerprint=self.fingerprint,
            scheme=max(found.groups, key=lambda group: group.numel).scheme,
            size=Size(
                bytes=found.bytes,
                parameters=sum(group.numel for group in found.groups),
                bits_per_weight=8 * found.bytes / max(1, sum(group.numel for group in found.groups)),
                linear_bits_per_weight=8 * sum(group.bytes for group in quantized) / linear if linear else None,
            ),
            layers=[
                Layer(
                    name=layer["name"],
                    scheme=layer["scheme"],
                    shape=layer["shape"],
                    error=layer["error"],
                    error_of=layer.get("error_of", "outputs"),
                )
                for layer in worst_first(self._layers)
            ],
            training=[
                TrainingRecord.model_validate({"step": number, **step["training"]})
                for number, step in enumerate(self.made.get("steps", []))
                if "training" in step
            ],
            recipe=self.made.get("recipe"),
            reload=self.made.get("reload"),
            loaders=self._loaders(),
            warnings=list(self.warnings),
        )

    def _loaders(self) -> list[Loader]:
        """Which other programs load it; not asked of a baseline."""
        if self.role == "baseline":
            return []
        try:
            facts = facts_of_checkpoint(self.directory)
        except (SmeltError, RuntimeProblem, ValueError, KeyError):
            return []  # another program's checkpoint, which can still be measured
        return [] if facts is None else loaders(facts)

    @cached_property
    def _inspection(self) -> Any:
        return inspect(str(self.directory.path))


def subjects(checkpoints: list[str], baseline: str | None, *, trust_remote_code: bool = False) -> list[Subject]:
    """Checkpoints to be measured, the baseline first, named so that no two are called the same.

    Raises:
        SmeltError: one is missing; one line each.
    """
    names = ([baseline] if baseline else []) + checkpoints
    found: list[ModelDirectory] = []
    problems = []
    for name in names:
        try:
            directory = find_checkpoint(name, trust_remote_code=trust_remote_code)
            directory.config_data()
            found.append(directory)
        except SmeltError as error:
            problems.append(str(error))
    if problems:
        raise SmeltError("\n".join(problems))
    places = [directory.path.resolve() for directory in found]
    twice = next((name for name, place in zip(names, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise SmeltError(f"{twice} is named twice; name each checkpoint once, and the baseline only as --baseline")
    short = [_short(name) for name in names]
    called = [name if short.count(each) > 1 else each for name, each in zip(names, short, strict=True)]
    return [
        Subject(name, directory, "baseline" if baseline and i == 0 else "candidate")
        for i, (name, directory) in enumerate(zip(called, found, strict=True))
    ]


def worst_first(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records by falling error; layers that no token reached come first, as their error is unknown."""
    return sorted(layers, key=lambda r: (-(float("inf") if r["error"] is None else r["error"]), r["name"]))


def _short(name: str) -> str:
    """``runs/mine/checkpoint`` as ``mine``."""
    path = Path(name.rstrip("/"))
    return path.parent.name if path.name == "checkpoint" and path.parent.name else path.name or name

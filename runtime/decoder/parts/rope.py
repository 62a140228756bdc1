"""Rotary positions, with every scaling that transformers knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# These two choose their frequencies by the sequence length; all others are fixed.
_BY_LENGTH = ("dynamic", "longrope")
# Without scaling, transformers rotates whole heads in all other architectures, whatever their configuration says.
_PARTLY_ROTATED = ("phi3", "gpt_neox")


@dataclass(frozen=True)
class Rope:
    """One way of rotating queries and keys.

    Attributes:
        kind: transformers' name of the scaling.
        original_length: the length above which frequencies change, where they do.
        longest: the positions that it reaches, which for YaRN and dynamic scaling may be more than ``max_position_embeddings``.
    """

    kind: str
    original_length: int
    longest: int
    _config: Any
    _layer_type: str | None

    @classmethod
    def of(cls, config: Any, layer_type: str | None = None) -> Rope:
        """The rotation that a Hugging Face config describes (for one type of layer, where they differ)."""
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        known = config.max_position_embeddings
        original = parameters.get("original_max_position_embeddings")
        kind, longest = parameters.get("rope_type", "default"), known
        if kind == "dynamic" or (kind == "yarn" and original):
            # Models are extended by adding the scaling to their configuration and leaving the rest.
            longest = max(known, int(parameters.get("factor", 1.0) * (known if kind == "dynamic" else original)))
        return cls(kind, original or known, longest, config, layer_type)

    @property
    def unscaled_length(self) -> int | None:
        """How long a sequence may get before dynamic scaling changes its frequencies; None without it."""
        return self._config.max_position_embeddings if self.kind == "dynamic" else None

    def variant(self, length: int) -> int:
        """The frequencies of a sequence that may grow to ``length`` tokens.

        A sequence keeps them throughout, since rotated keys stay in the cache: transformers changes
        them in mid-sequence, which does not apply to keys cached before.
        """
        if self.kind == "longrope":
            return int(length > self.original_length)
        if self.kind == "dynamic":
            return max(length, self._config.max_position_embeddings)
        return 0

    def frequencies(self, variant: int) -> tuple[Tensor, float]:
        """Inverse frequencies, and the factor of cosines and sines."""
        if self.kind == "default":
            return self._default(), 1.0
        length = None
        if self.kind == "longrope":
            length = self.original_length + variant
        elif self.kind == "dynamic":
            length = variant
        return ROPE_INIT_FUNCTIONS[self.kind](
            self._config, torch.device("cpu"), seq_len=length, layer_type=self._layer_type
        )

    def _default(self) -> Tensor:
        config = self._config
        parameters = config.rope_parameters if self._layer_type is None else config.rope_parameters[self._layer_type]
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        part = parameters.get("partial_rotary_factor", 1.0) if config.model_type in _PARTLY_ROTATED else 1.0
        rotated = int(head_size * part)
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)


class Rotations:
    """Cosines and sines of positions, for the ropes of a model."""

    def __init__(self, ropes: dict[str, Rope], dtype: torch.dtype) -> None:
        self._ropes = ropes
        self._dtype = dtype
        self._known: dict[tuple[str, int], tuple[Tensor, float]] = {}
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the sequence length."""
        return any(rope.kind in _BY_LENGTH for rope in self._ropes.values())

    def variants(self, length: int) -> dict[str, int]:
        """Each rope's variant for a sequence that may grow to ``length``."""
        return {name: rope.variant(length) for name, rope in self._ropes.items()}

    def of(self, positions: Tensor, lengths: list[tuple[int, int]]) -> dict[str, tuple[Tensor, Tensor]]:
        """By rope: cosines and sines ``[tokens, 1, rotated / 2]``.

        Args:
            positions: of the tokens of a step.
            lengths: for each run of tokens, how many they are and the length their sequence may grow to.
        """
        found = {}
        for name, rope in self._ropes.items():
            if rope.kind in _BY_LENGTH:
                pieces = [(count, *self._frequencies(name, rope.variant(length))) for count, length in lengths]
                frequencies = torch.cat([f.expand(count, -1) for count, f, _ in pieces])
                scale = torch.cat([torch.full((count, 1, 1), s, device=positions.device) for count, _, s in pieces])
                found[name] = self._cos_sin(positions, frequencies, scale)
            else:
                cosines, sines = self._table(name, int(positions.max()) if len(positions) else 0)
                found[name] = (cosines[positions], sines[positions])
        return found

    def tables(self, length: int) -> dict[str, tuple[Tensor, Tensor]]:
        """By rope, those of all positions up to ``length``; for ropes that do not depend on it."""
        positions = torch.arange(length)
        return {name: self._cos_sin(positions, *self._frequencies(name, 0)) for name in self._ropes}

    def _table(self, name: str, highest: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions up to ``highest`` and some more."""
        known = self._tables.get(name)
        if known is None or len(known[0]) <= highest:
            positions = torch.arange(max(1024, 2 * highest))
            known = self._tables[name] = self._cos_sin(positions, *self._frequencies(name, 0))
        return known

    def _cos_sin(self, positions: Tensor, frequencies: Tensor, scale: Tensor | float) -> tuple[Tensor, Tensor]:
        angles = (positions[:, None].float() * frequencies.to(positions.device)).unsqueeze(1)
        return (angles.cos() * scale).to(self._dtype), (angles.sin() * scale).to(self._dtype)

    def _frequencies(self, name: str, variant: int) -> tuple[Tensor, float]:
        key = (name, variant)
        if key not in self._known:
            self._known[key] = self._ropes[name].frequencies(variant)
        return self._known[key]


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate ``[tokens, heads, size]``; only the elements of each head that have frequencies."""
    half = cosine.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    if heads.shape[-1] > 2 * half:
        rotated.append(heads[..., 2 * half :])
    return torch.cat(rotated, dim=-1)

"""A random rotation of the residual stream, which makes hidden states alike in size (QuaRot: Ashkboos et al., 2024)."""

from __future__ import annotations

from .options.rotate import RotateOptions
from .rotated_model import ModelRotation, Residual


def rotate(residual: Residual, hidden_size: int, seed: int, options: RotateOptions) -> ModelRotation:
    """Draw a rotation, with or without one for each value head."""
    rotation = ModelRotation.random(residual, hidden_size, seed)
    return rotation if options.heads else ModelRotation(rotation.hidden, (None,) * len(residual.blocks))

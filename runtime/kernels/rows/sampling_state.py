"""What the device knows of each sequence that it samples for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALWAYS = 2**31 - 1


@dataclass(frozen=True)
class SamplingState:
    """The sampling parameters and history of the sequence in each slot.

    Attributes:
        history: int32 ``[slots, most]``, prompt and output.
        prompt_lengths: int32; how much of the history the prompt is.
        temperature: float32; 0 takes the most likely token.
        top_k: int32; 0 for all.
        top_p, min_p: float32; 1 and 0 for all.
        repetition, presence, frequency: float32 penalties.
        seeds: int64; of the noise, together with the length of the sequence.
        edit_counts: int32; how many of the slot's edits are used.
        edit_tokens: int32 ``[slots, edits]``; whose logits are changed before anything else.
        edit_values: float32; what is added to them, minus infinity to forbid.
        edit_until: int32; the first length of the sequence at which an edit no longer applies.
    """

    history: Tensor
    prompt_lengths: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seeds: Tensor
    edit_counts: Tensor
    edit_tokens: Tensor
    edit_values: Tensor
    edit_until: Tensor


def choices(slots: int, edits: int, history: int, device: torch.device) -> SamplingState:
    """Slots that take the most likely token.

    Args:
        slots: how many.
        edits: the most that one may ask for.
        history: the most tokens of a sequence.
        device: where they are.
    """

    def of(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((slots, *shape), value, dtype=dtype, device=device)

    return SamplingState(
        history=of(0, torch.int32, history),
        prompt_lengths=of(0, torch.int32),
        temperature=of(0, torch.float32),
        top_k=of(0, torch.int32),
        top_p=of(1, torch.float32),
        min_p=of(0, torch.float32),
        repetition=of(1, torch.float32),
        presence=of(0, torch.float32),
        frequency=of(0, torch.float32),
        seeds=of(0, torch.int64),
        edit_counts=of(0, torch.int32),
        edit_tokens=of(0, torch.int32, edits),
        edit_values=of(0, torch.float32, edits),
        edit_until=of(_ALWAYS, torch.int32, edits),
    )

"""Where a scale can move: what the channels of a feeder lose, the columns of its readers gain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..layer_stats import LayerStats
from ..scheme import Scheme


@dataclass(frozen=True)
class Feeder:
    """A norm or linear whose output channels, one by one, are the input channels of other linears.

    Attributes:
        weight: float32, edited in place: ``[channels]`` of a norm, ``[rows, columns]`` of a linear.
        bias: the same of its bias, if it has one.
        channels: for every input channel of the readers, the output channel that feeds it.
        offset: what a norm adds to its weight before it multiplies; Gemma's adds 1.
        stored: what the weight is stored in.
    """

    weight: Tensor
    bias: Tensor | None
    channels: Tensor
    offset: float
    stored: torch.dtype

    @property
    def is_norm(self) -> bool:
        return self.weight.dim() == 1


@dataclass(frozen=True)
class Reader:
    """A matrix that reads a feeder's output.

    Attributes:
        name: what to call it.
        weight: float32 ``[rows, columns]``, edited in place.
        scheme: what it will be stored as; None if it stays as it is, as a router does.
    """

    name: str
    weight: Tensor
    scheme: Scheme | None


@dataclass(frozen=True)
class Readers:
    """Matrices that read the very same tensor, and what is known of it."""

    members: tuple[Reader, ...]
    stats: LayerStats

    @property
    def quantized(self) -> list[Reader]:
        return [reader for reader in self.members if reader.scheme is not None]


@dataclass(frozen=True)
class Link:
    """A feeder and everything that reads it."""

    feeder: Feeder
    groups: tuple[Readers, ...]

    @cached_property
    def places(self) -> Tensor:
        """For every input channel of the readers, its place among the factors."""
        return torch.unique(self.feeder.channels, return_inverse=True)[1]

    @property
    def size(self) -> int:
        """How many factors can be chosen: where several query heads share a value head, fewer than there are inputs."""
        return int(self.places.max()) + 1

    def largest(self, by_input: Tensor) -> Tensor:
        """A figure for each factor from one for each input channel: the largest of those that share it."""
        return by_input.new_zeros(self.size).scatter_reduce(0, self.places, by_input, "amax")

    def mean(self, by_input: Tensor) -> Tensor:
        """A figure for each factor from one for each input channel: the mean of those that share it."""
        return by_input.new_zeros(self.size).scatter_reduce(0, self.places, by_input, "mean", include_self=False)

    def input_peaks(self) -> Tensor:
        """The largest magnitude of each input channel on the calibration text, for each factor."""
        return self.largest(torch.stack([group.stats.peak for group in self.groups]).amax(0))

    def weight_peaks(self) -> Tensor:
        """The largest magnitude in the columns of all quantized readers, for each factor."""
        columns = [reader.weight.abs().amax(0) for group in self.groups for reader in group.quantized]
        return self.largest(torch.stack(columns).amax(0))

    def seen(self) -> bool:
        """Whether any calibration token reached it."""
        return any(group.stats.tokens for group in self.groups)

    def move(self, factors: Tensor) -> None:
        """Divide the feeder's channels by ``factors`` and multiply the readers' columns by them.

        A norm's weight is stored in few bits. What it loses by that, the readers make up for: the function
        stays what it was to float32's precision.
        """
        feeder = self.feeder
        channels = torch.empty(self.size, dtype=torch.long).scatter_(0, self.places, feeder.channels)
        if feeder.is_norm:
            before = feeder.weight[channels] + feeder.offset
            after = (before / factors - feeder.offset).to(feeder.stored).to(before.dtype) + feeder.offset
            exact = before / after
            factors = torch.where((before != 0) & (after != 0) & torch.isfinite(exact), exact, torch.ones_like(before))
            feeder.weight[channels] = before / factors - feeder.offset
        else:
            feeder.weight[channels] /= factors[:, None]
        if feeder.bias is not None:
            feeder.bias[channels] /= factors
        for group in self.groups:
            for reader in group.members:
                reader.weight.mul_(factors[self.places])

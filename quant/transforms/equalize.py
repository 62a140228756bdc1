"""Weight equalisation: a linear's rows and its reader's columns get the same range (Nagel et al., 2019, arXiv:1906.04721)."""

from __future__ import annotations

import torch

from .link import Link
from .options.base import TransformOptions


def equalize(link: Link, options: TransformOptions) -> None:
    """Scale each channel between two linears so that both have its largest weight equally large.

    A norm has no rows that are quantized, so there is nothing to equalise with.
    """
    feeder = link.feeder
    if feeder.is_norm:
        return
    channels = torch.empty(link.size, dtype=torch.long).scatter_(0, link.places, feeder.channels)
    rows, columns = feeder.weight[channels].abs().amax(1), link.weight_peaks()
    usable = (rows > 0) & (columns > 0)
    link.move(torch.where(usable, (rows / columns).sqrt(), 1.0))

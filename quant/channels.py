"""Input channels that calibration shows to be dead or far larger than the rest."""

from __future__ import annotations

from .layer_stats import LayerStats
from .scheme import Scheme

# Above this, one channel takes more than half of the codes of an 8-bit range that all channels share.
_EXPLODING = 200.0


def channel_notes(stats: LayerStats, scheme: Scheme) -> list[str]:
    """Notes about unusual input channels; none for a layer that no token reached.

    Channels that are always zero are reported for every scheme. One much larger than the median matters where inputs
    are rounded with a scale that it shares with all others.
    """
    if stats.tokens == 0 or not len(stats.high):
        return []
    peak = stats.peak
    dead = int((peak == 0).sum())
    notes = [f"{dead} of its {len(peak)} input channels are zero on all of the calibration text"] if dead else []
    inputs = scheme.activations
    if inputs is not None and inputs.strategy in ("token", "tensor"):
        usual = peak[peak > 0].median().item() if dead < len(peak) else 0.0
        worst = int(peak.argmax())
        if usual and peak[worst].item() > _EXPLODING * usual:
            notes.append(
                f"input channel {worst} reaches {peak[worst].item() / usual:,.0f} times the median channel's peak, which"
                " costs the others precision; try the transforms smooth and rotate"
            )
    return notes

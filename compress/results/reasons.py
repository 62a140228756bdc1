"""Why a model is as fast as it is: the roofline's prediction compared with the measurement."""

from __future__ import annotations

from ...system.hardware.machine import human_bytes
from .result import Machine, Speed

# Weights that may fit in a processor's caches.
_CACHED = 32_000_000
# This close to the prediction there is nothing to explain.
_CLOSE = 0.07
# Models whose products differ by less count as equal.
_SAME = 0.005


def reasons(baseline: Speed, model: Speed, machine: Machine, *, decode: float, prefill: float) -> list[str]:
    """Sentences about decoding and about prompts.

    Args:
        baseline, model: speeds under the same load.
        decode, prefill: how many times as fast as the baseline the model was measured to be.
        machine: whose bandwidth and products the limits come from.

    Returns:
        Nothing where one is behind a server, as its weights are not known.
    """
    if not baseline.decode_bytes_per_token or not model.decode_bytes_per_token:
        return []
    found = [_decoding(baseline, model, decode)]
    if model.decode_bytes_per_token < _CACHED:
        found.append("Weights this small partly stay in the processor's caches, which are faster than memory.")
    if baseline.prefill_of_limit is not None and model.prefill_of_limit is not None:
        found.append(_prompts(baseline, model, machine, prefill))
    return found


def _decoding(baseline: Speed, model: Speed, measured: float) -> str:
    assert baseline.decode_bytes_per_token is not None
    assert model.decode_bytes_per_token is not None
    predicted = baseline.decode_bytes_per_token / model.decode_bytes_per_token
    if model.decode_bytes_per_token == baseline.decode_bytes_per_token:
        reading = f"A token reads {human_bytes(model.decode_bytes_per_token)} of weights in both, so memory predicts no speedup"
    else:
        reading = (
            f"A token reads {human_bytes(model.decode_bytes_per_token)} of weights instead of"
            f" {human_bytes(baseline.decode_bytes_per_token)}, so memory alone predicts decoding at {predicted:.2f}× the"
            " baseline's speed"
        )
    if abs(measured / predicted - 1) <= _CLOSE or model.decode_limit is None or baseline.decode_limit is None:
        return f"{reading}; {measured:.2f}× was measured."
    mine, theirs = 1e3 / model.decode_rate.median, 1e3 / baseline.decode_rate.median
    floor, their_floor = 1e3 / model.decode_limit, 1e3 / baseline.decode_limit
    if measured < predicted:
        why = (
            f"of {mine:.2f} ms a token only {floor:.2f} ms is reading weights at full bandwidth; the other"
            f" {mine - floor:.2f} ms (attention, norms, sampling, Python) do not shrink with the weights, and the baseline"
            f" spends {max(0.0, theirs - their_floor):.2f} ms on them"
        )
    else:
        why = (
            f"reading weights at full bandwidth would take {floor:.2f} of its {mine:.2f} ms a token, but only"
            f" {their_floor:.2f} of the baseline's {theirs:.2f} ms: its kernels come closer to the limit"
        )
    return f"{reading}; {measured:.2f}× was measured: {why}."


def _prompts(baseline: Speed, model: Speed, machine: Machine, measured: float) -> str:
    assert baseline.prefill_of_limit is not None
    assert model.prefill_of_limit is not None
    # The limits are this machine's rate over each model's products.
    fewer = 1 - baseline.prefill_limit / model.prefill_limit if baseline.prefill_limit and model.prefill_limit else 0.0
    saved = (
        f"of which this model has {fewer:.0%} fewer"
        if fewer > _SAME
        else "which storing weights in fewer bits does not reduce"
    )
    return (
        f"Prefill is bound by matrix products, {saved}: the baseline reaches"
        f" {baseline.prefill_of_limit:.0%} and this model {model.prefill_of_limit:.0%} of the rate of this machine's"
        f" {machine.operations_dtype} products (integer products may exceed it), so prefill runs at {measured:.2f}×."
    )

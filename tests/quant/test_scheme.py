"""Schemes: names and fields are compressed-tensors', sizes are what is stored."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from smelt.quant.activations import ActivationRounding
from smelt.quant.rounding.nearest import nearest
from smelt.quant.scheme import resolve
from smelt.quant.scheme_names import SCHEMES, STORED_AS, SUPPORTED, UNWRITTEN, why_unsupported


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_scheme_is_the_librarys_preset(name: str) -> None:
    preset = preset_name_to_scheme(STORED_AS.get(name, name), ["Linear"])
    scheme = resolve(name)
    if name == "FP8":  # one scale an output instead of one for the whole weight: never worse, and read as well
        preset.weights.strategy = "channel"
    assert scheme.args == preset.weights
    assert scheme.activations == preset.input_activations


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("shape", [(128, 256), (384, 512)])
def test_stored_bytes_are_the_bytes_that_are_stored(name: str, shape: tuple[int, int]) -> None:
    scheme = resolve(name)
    stored = nearest(torch.randn(shape, dtype=torch.bfloat16), scheme.args).stored(scheme)
    if scheme.activations is not None:
        low, high = torch.tensor(-1.0), torch.tensor(2.0)
        stored |= ActivationRounding.observed(scheme.activations, low, high, torch.bfloat16).stored()
    assert scheme.stored_bytes(*shape) == sum(t.numel() * t.element_size() for t in stored.values())


def test_group_size_changes_the_grain() -> None:
    assert resolve("W4A16", 32).args.group_size == 32
    per_channel = resolve("W4A16", -1)
    assert per_channel.args.strategy == "channel"
    assert per_channel.shape_problem(64, 172) is None


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_impossible_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive, or -1"):
        resolve("W4A16", group_size)


def test_schemes_without_groups_refuse_a_group_size() -> None:
    with pytest.raises(ValueError, match="FP8_DYNAMIC has no group_size"):
        resolve("FP8_DYNAMIC", 64)


@pytest.mark.parametrize(
    ("name", "group", "shape", "hint"),
    [
        ("W4A16", 64, (64, 172), "group_size: -1"),
        ("W4A16", 128, (64, 192), "group_size: 64"),
        ("NVFP4A16", None, (64, 172), "fixed group of 16"),
        ("FP8_BLOCK", None, (128, 192), "block width of 128"),
    ],
)
def test_shapes_that_do_not_divide_are_reported_with_a_way_out(
    name: str, group: int | None, shape: tuple[int, int], hint: str
) -> None:
    sentence = resolve(name, group).shape_problem(*shape)
    assert sentence is not None
    assert str(shape[1]) in sentence
    assert hint in sentence


def test_presets_that_are_refused_come_with_a_reason() -> None:
    assert "Smelt does not write it" in (why_unsupported("MXFP6A16") or "")
    assert why_unsupported("W4A16") is None
    assert why_unsupported("W4A16_ASYM") is None
    assert why_unsupported("no-such-scheme") is None


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_can_be_chosen_is_what_the_presets_have(name: str) -> None:
    """Recipes are checked against a table of our own, since compressed-tensors takes seconds to import."""
    preset = preset_name_to_scheme(STORED_AS.get(name, name), ["Linear"])
    weights, inputs = preset.weights, preset.input_activations
    assert weights is not None
    grouped = weights.type == "int" and weights.strategy == "group"
    assert SCHEMES[name].group == (weights.group_size if grouped else None)
    scaled = inputs is not None and inputs.num_bits == 8 and inputs.strategy in ("token", "tensor")
    assert SCHEMES[name].inputs == (inputs.type if inputs is not None and scaled else None)


def test_every_preset_is_known_by_name() -> None:
    assert {*SUPPORTED, *UNWRITTEN} - STORED_AS.keys() == set(PRESET_SCHEMES)


def test_two_schemes_never_have_one_label() -> None:
    """Linears are put together by it, in one group of the checkpoint's configuration."""
    ways = [(name, None) for name in SUPPORTED]
    ways += [(name, inputs) for name in ("FP8", "W8A8") for inputs in ("dynamic", "static")]
    found: dict[str, tuple[object, object]] = {}
    for name, inputs in ways:
        scheme = resolve(name, None, inputs)
        # How a scale is looked for is no part of what is stored.
        rounded = None if scheme.activations is None else scheme.activations.model_copy(update={"observer": None})
        assert found.setdefault(scheme.label, (scheme.args, rounded)) == (scheme.args, rounded)

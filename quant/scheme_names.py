"""The schemes by name, and what a recipe may choose of each, without importing torch; :mod:`.scheme` builds them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class SchemeFields(NamedTuple):
    """What can be chosen of a scheme.

    Attributes:
        group: columns that share a scale, where that can be chosen: the usual number.
        inputs: the type of 8-bit inputs whose scales may come from each token or from the calibration text.
    """

    group: int | None = None
    inputs: Literal["int", "float"] | None = None


# Each of these is written by Smelt, reloads through transformers and is tested to do so. W4A16_ASYM must be restored as
# it is loaded: transformers 5.23 has no place for packed zero-points in a model that it keeps compressed.
SCHEMES: dict[str, SchemeFields] = {
    "W4A16": SchemeFields(group=128),
    "W4A16_ASYM": SchemeFields(group=128),
    "W8A16": SchemeFields(group=128),
    "W4IN8": SchemeFields(group=128),
    "W8A8": SchemeFields(inputs="int"),
    "FP8_DYNAMIC": SchemeFields(inputs="float"),
    "FP8_BLOCK": SchemeFields(),
    "FP8": SchemeFields(inputs="float"),
    "W3A16": SchemeFields(group=128),
    "W2A16": SchemeFields(group=128),
    "W4A8": SchemeFields(group=128, inputs="int"),
    "W4AFP8": SchemeFields(group=128, inputs="float"),
    "W4A4": SchemeFields(group=128),
    "NVFP4A16": SchemeFields(),
    "NVFP4": SchemeFields(),
    "MXFP4A16": SchemeFields(),
    "MXFP4": SchemeFields(),
}
SUPPORTED = tuple(SCHEMES)
SPELLED = (*SUPPORTED, "W4in8")  # for editors, which compare letter by letter
# To compressed-tensors a scheme of another name; W4in8 is 8 bits whose upper four are a model, too.
STORED_AS = {"W4IN8": "W8A16"}
# The rounding that makes a scheme what its name says, where a recipe names none.
OWN_ROUNDING = {"W4IN8": "nested"}
NESTED = ("W4IN8", "W8A16")  # what that rounding can write
# compressed-tensors' other presets.
UNWRITTEN = (
    "INT8",
    "MXFP4XFP8",
    "MXFP6A16",
    "MXFP6A8",
    "MXFP8",
    "MXFP8A16",
    "UNQUANTIZED",
    "W2A4",
    "W2A8",
    "W3A4",
    "W3A8",
    "W5A16",
    "W5A8",
    "W6A16",
    "W6A8",
    "W7A16",
    "W7A8",
)


def why_unsupported(name: str) -> str | None:
    """For a preset of compressed-tensors that Smelt does not write: the reason. Otherwise None."""
    return "Smelt does not write it" if name.upper() in UNWRITTEN else None


def check(name: str, group_size: int | None = None, inputs: str | None = None) -> None:
    """See to it that a scheme has these choices; for the arguments see :func:`smelt.quant.scheme.resolve`.

    Raises:
        ValueError: the name is not supported, or the scheme has no such choice.
    """
    if name.upper() not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}; known: {', '.join(SUPPORTED)}")
    choices = SCHEMES[name.upper()]
    if group_size is not None and choices.group is None:
        raise ValueError(f"scheme {name} has no group_size; remove the field")
    if group_size is not None and group_size != -1 and group_size <= 0:
        raise ValueError(f"group_size must be positive, or -1 for one scale per output channel, not {group_size}")
    if inputs is not None and choices.inputs is None:
        raise ValueError(f"scheme {name} has no 8-bit inputs, so it cannot have {inputs} scales; remove the field")
    if inputs == "static_asymmetric" and choices.inputs != "int":
        raise ValueError(f"scheme {name} has no zero-points; use inputs: static")


def with_own_rounding(fields: Any) -> Any:
    """Settings as a recipe gives them, with the rounding that their scheme brings along where they name none."""
    if isinstance(fields, dict) and fields.get("rounding") is None and isinstance(fields.get("scheme"), str):
        own = OWN_ROUNDING.get(fields["scheme"].upper())
        return fields if own is None else {**fields, "rounding": own}
    return fields


def check_rounding(name: str, method: str) -> None:
    """See to it that a rounding method writes what a scheme promises.

    Raises:
        ValueError: it does not.
    """
    own = OWN_ROUNDING.get(name)
    if own is not None and method not in (own, "nearest"):
        raise ValueError(f"scheme {name} is rounded by {own} or nearest, not by {method}")
    if method == "nested" and name not in NESTED:
        raise ValueError(f"rounding nested is for scheme W4in8 or W8A16, not for {name}")


def settled(name: str, group_size: int | None) -> tuple[str, int | None]:
    """A scheme and its group size: equal for two ways to say the same."""
    return name.upper(), SCHEMES[name.upper()].group if group_size is None else group_size

"""Constants of a device: the shipped ones by name, or one's own YAML file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...system.errors import RuntimeProblem, nearest_name

_FOLDER = Path(__file__).parent
# What each constant is, in SI units.
CONSTANTS = {
    "memory_bytes": "memory",
    "bandwidth": "bytes a second that its memory delivers",
    "flops_bf16": "dense operations a second in bfloat16, a multiplication and an addition counted as two",
    "flops_fp16": "the same in float16",
    "flops_fp8": "the same in 8-bit floats",
    "flops_int8": "the same in int8",
    "flops_fp4": "the same in 4-bit floats",
    "link": "bytes a second to its peers, in one direction",
    "host_link": "bytes a second to the host's memory, in one direction",
    "power_watts": "power",
}


@dataclass(frozen=True)
class Constant:
    """A number about a device.

    Attributes:
        value: in SI units; None if no source was found.
        source: where it stands.
        verified: whether somebody read it there.
        note: what else one should know.
    """

    value: float | None
    source: str
    verified: bool
    note: str = ""


@dataclass(frozen=True)
class Device:
    """A device's constants.

    Attributes:
        name: its maker's.
        kind: such as ``gpu``.
        constants: by the names of :data:`CONSTANTS`; those that it does not have are missing.
    """

    name: str
    kind: str
    constants: dict[str, Constant]

    def value(self, constant: str) -> float:
        """A constant that is needed.

        Raises:
            RuntimeProblem: it is not known.
        """
        found = self.constants.get(constant)
        if found is None or found.value is None:
            raise RuntimeProblem(
                f"{self.name}: {constant} ({CONSTANTS[constant]}) is not known; give a device file that has it"
            )
        return found.value


def shipped_devices() -> list[str]:
    """The names of the devices that come with Smelt."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_device(name: str) -> Device:
    """A device by its shipped name, or from a file.

    Raises:
        RuntimeProblem: there is no such device, or its file is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if path.parent == _FOLDER and path.stem not in shipped_devices():
        known = shipped_devices()
        raise RuntimeProblem(
            f"unknown device {name!r}; known: {', '.join(known)}, or the path of a .yaml file{nearest_name(name, known)}"
        )
    try:
        return _parsed(yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RuntimeProblem(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise RuntimeProblem(f"{path}: is not a device file ({reason}); runtime/devices/h100-sxm.yaml is one") from None


def _parsed(data: Any) -> Device:
    if not isinstance(data, dict) or not isinstance(data.get("constants"), dict):
        raise ValueError("it needs name, kind and constants")
    found = {}
    for name, given in data["constants"].items():
        if name not in CONSTANTS:
            raise ValueError(
                f"unknown constant {name!r}; known: {', '.join(CONSTANTS)}{nearest_name(str(name), list(CONSTANTS))}"
            )
        fields = given if isinstance(given, dict) else {"value": given}
        value = _number(name, fields.get("value"))
        found[name] = Constant(
            value, str(fields.get("source", "unknown")), fields.get("verified") is True, str(fields.get("note", ""))
        )
    return Device(str(data.get("name", "unnamed")), str(data.get("kind", "unknown")), found)


def _number(name: str, given: Any) -> float | None:
    if given is None:
        return None
    try:
        # YAML reads 3.35e12, without a sign, as text.
        value = float(given) if not isinstance(given, bool) else math.nan
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {given!r}; it must be a number above 0")
    return value

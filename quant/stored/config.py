"""``quantization_config`` in ``config.json``, by compressed-tensors' own schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import compressed_tensors
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from pydantic import ValidationError

from ...system.errors import SmeltError
from ..scheme import Scheme

Needs = Literal["nothing", "dequantizing", "plug-in"]


def quantization_config(
    schemes: dict[str, Scheme],
    ignore: list[str],
    keys_values: QuantizationArgs | None = None,
    tables: dict[str, Scheme] | None = None,
    head: list[str] | None = None,
) -> dict[str, Any]:
    """``config.json``'s ``quantization_config``, by compressed-tensors' own schema.

    A single scheme targets every linear that is not ignored. Several schemes list their linears by full name, as loaders
    differ in which pattern wins. A quantized lm_head is always listed: vLLM's is not of a linear class.

    Args:
        schemes: each linear's scheme, by every name that a loader may use.
        ignore: modules that are not quantized.
        keys_values: arguments of the KV cache.
        tables: the embeddings' schemes, by every name of each.
        head: the output head's names, if it is quantized.
    """
    named = _by_scheme(schemes)
    if len(named) == 1:
        named = [(named[0][0], [*(head or []), "Linear"])]
    formats = {scheme.format for scheme in [*schemes.values(), *(tables or {}).values()]}
    config = QuantizationConfig(
        config_groups={
            f"group_{i}": scheme.config_group(names)
            for i, (scheme, names) in enumerate([*named, *_by_scheme(tables or {})])
        },
        ignore=ignore,
        kv_cache_scheme=keys_values,
        format=_overall_format(formats),
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    return {
        **config.model_dump(mode="json"),
        "quant_method": "compressed-tensors",
        "version": compressed_tensors.__version__,
    }


def _by_scheme(schemes: dict[str, Scheme]) -> list[tuple[Scheme, list[str]]]:
    groups: dict[str, tuple[Scheme, list[str]]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme.label, (scheme, []))[1].append(name)
    return list(groups.values())


def _overall_format(formats: set[str]) -> str:
    if not formats:
        return CompressionFormat.dense.value
    return next(iter(formats)) if len(formats) == 1 else CompressionFormat.mixed_precision.value


def needs(schemes: list[Scheme], *, experts: list[Scheme], cached: bool) -> Needs:
    """What transformers needs to load packed zero-points, and experts in formats that it does not fuse.

    Args:
        schemes: what linears are stored as.
        experts: those that a mixture's experts are stored as; none without experts.
        cached: whether keys and values are rounded.
    """
    if not all(scheme.experts_reload for scheme in experts):
        return "plug-in"
    if all(scheme.args.symmetric for scheme in schemes):
        return "nothing"
    # Together with other schemes transformers restores zero-points wrongly or not at all.
    alone = not cached and all(scheme == schemes[0] for scheme in schemes)
    return "dequantizing" if alone and not experts else "plug-in"


_OFFLINE = ("weight_input", "weight_output")


def online_transforms(data: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with this ``quantization_config`` cannot be computed: its inputs or weights are transformed as it runs."""
    groups = (data.get("transform_config") or {}).get("config_groups") or {}
    # Those of weights alone are in the stored weights already; llm-compressor records them, too.
    online = [
        str(name)
        for name, group in groups.items()
        if any(each.get("location") not in _OFFLINE for each in (group or {}).get("apply") or [{}])
    ]
    if not online:
        return None
    return f"it needs transforms while it runs (transform_config: {', '.join(online)}), which Smelt does not compute"


class StoredSchemes:
    """How the linears of a checkpoint are stored, by its ``quantization_config``.

    Attributes:
        keys_values: arguments of its KV cache; None if unquantized.

    Raises:
        SmeltError: modules other than linears are quantized by their class, so that their names are not known.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        unknown = online_transforms(data)
        if unknown is not None:
            raise SmeltError(f"quantization_config: {unknown}")
        known = {key: value for key, value in data.items() if key != "version"}
        self._usual: Scheme | None = None
        self._by_name: dict[str, Scheme] = {}
        try:
            config = QuantizationConfig.model_validate(known)
        except ValidationError as error:
            first = " ".join(error.errors()[0]["msg"].split())
            raise SmeltError(
                f"quantization_config is none of compressed-tensors {compressed_tensors.__version__}: {first}"
            ) from None
        self.keys_values = config.kv_cache_scheme
        for group in config.config_groups.values():
            assert isinstance(group, QuantizationScheme)
            scheme = Scheme.of_group(group)
            for target in group.targets:
                if target == "Linear":
                    self._usual = scheme
                elif re.fullmatch(r"[A-Z]\w*", target):
                    raise SmeltError(
                        f"quantization_config quantizes all modules of the class {target}; only the runtime reads such a"
                        " checkpoint, so start from the original model"
                    )
                else:
                    self._by_name[target] = scheme

    @property
    def used(self) -> list[Scheme]:
        """All that linears are stored as."""
        return [*self._by_name.values(), *([] if self._usual is None else [self._usual])]

    def needs(self, tensors: Iterable[str]) -> Needs:
        """What transformers needs to load it; see :func:`needs`.

        Args:
            tensors: names of all that is stored.
        """
        end = ".weight_scale"
        found = (self.of(name.removesuffix(end)) for name in tensors if ".experts." in name and name.endswith(end))
        of_experts = list({scheme.label: scheme for scheme in found}.values())
        return needs(self.used, experts=of_experts, cached=self.keys_values is not None)

    def names(self, name: str) -> bool:
        """Whether a group names this module, other than by its class."""
        return name in self._by_name or any(
            target.startswith("re:") and re.match(target[3:], name) for target in self._by_name
        )

    def of(self, name: str) -> Scheme:
        """The scheme of a linear that is stored quantized."""
        patterns = (s for target, s in self._by_name.items() if target.startswith("re:") and re.match(target[3:], name))
        scheme = self._by_name.get(name) or next(patterns, self._usual)
        if scheme is None:
            raise SmeltError(f"{name}: is stored quantized, but no group of quantization_config names it")
        return scheme

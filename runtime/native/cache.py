"""The kernels' view of the KV cache."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...quant.row_rounding import code_range
from ..cache_types import cache_type_of
from ..decoder.parts.batch import Batch
from ..decoder.parts.kv_cache import KeysValues
from ..heads import Heads

LARGEST_HEAD = 512  # attention_runs.cpp packs 16 positions of a head at a time in its own memory


def stores(store: KeysValues) -> bool:
    """Whether the kernels write to the cache; if not, torch rounds as the checkpoint requires, and they only read."""
    return store.rules is None or cache_type_of(store.dtype).limit is not None


def also_addresses(batch: Batch) -> tuple[int, int, int]:
    """Addresses of the rows that are stored in further slots, and of these, and how many there are."""
    if batch.also is None:
        return 0, 0, 0
    rows, slots = batch.also
    return rows.data_ptr(), slots.data_ptr(), len(rows)


def layer_handle(kernels: ModuleType, store: KeysValues, layer: int, heads: Heads) -> Any:
    """One layer of the cache, made once."""
    found = store.handles.get(layer)
    if found is None:
        parts = store.layer(layer)
        found = store.handles[layer] = kernels.Cache(
            keys=parts.keys.data_ptr(),
            values=parts.values.data_ptr(),
            key_scales=0 if parts.key_scales is None else parts.key_scales.data_ptr(),
            value_scales=0 if parts.value_scales is None else parts.value_scales.data_ptr(),
            heads=heads.shared,
            size=heads.size,
            block=store.block_size,
            kind=cache_type_of(store.dtype).native,
            **_rule(store, layer, heads.shared),
        )
    return found


def _rule(store: KeysValues, layer: int, heads: int) -> dict[str, Any]:
    """The checkpoint's rounding of keys and values, for the kernels."""
    if store.rules is None or not stores(store):
        return {}
    rules = store.rules[layer]
    scales = [rule.by_head(heads) for rule in rules]
    store.handles["scales", layer] = scales  # the kernels have their addresses
    keys, values = (0 if each is None else each.data_ptr() for each in scales)
    least, most = code_range(rules[0].rounding.args)
    return {"key_rule": keys, "value_rule": values, "half": (most - least) / 2, "least": least, "most": most}

"""How several processes hold what they train together, as accelerate's launcher tells them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ...system.errors import SmeltError

_FULLY_SHARDED = "ACCELERATE_USE_FSDP"
_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
# What accelerate can be asked for and nothing here does: silence would be a lie.
_REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "keeping weights in main memory",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
_ONE = ("TP", "CP", "SP")


@dataclass(frozen=True)
class Arrangement:
    """How weights that are trained lie in several processes.

    Attributes:
        replicas: how many copies there are; each is spread over as many of the processes as all the others.
        reshard: give a block's weights up after each pass, and gather them again for its gradients.
    """

    replicas: int
    reshard: bool = True

    @classmethod
    def told(cls, count: int, environment: Mapping[str, str] = os.environ) -> Arrangement:
        """What ``accelerate launch`` has put into the environment; a copy for each process where it has put nothing.

        Args:
            count: how many processes there are.
            environment: of this one.

        Raises:
            SmeltError: it asks for what is not offered, or for another number of processes.
        """
        for variable, what in _REFUSED.items():
            if _is_on(environment, variable):
                raise SmeltError(
                    f"accelerate is told to use {what} ({variable}), which training here does not; turn it off"
                )
        mixed = environment.get("ACCELERATE_MIXED_PRECISION", "no")
        if mixed != "no":
            raise SmeltError(
                f"accelerate is told mixed_precision: {mixed}; the model's own type is computed in, so say no"
            )
        if _is_on(environment, "FSDP_ACTIVATION_CHECKPOINTING"):
            raise SmeltError(
                "accelerate is told to checkpoint activations; say checkpointing: true in the recipe instead"
            )
        reshard = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
        if _is_on(environment, _PARALLELISM):
            return cls(_replicas(count, environment), reshard)
        if not _is_on(environment, _FULLY_SHARDED):
            return cls(count)
        if environment.get("FSDP_VERSION", "2") != "2":
            raise SmeltError("accelerate is told to use the first FSDP; say fsdp_version: 2 in its configuration")
        return cls(1, reshard)


def _replicas(count: int, environment: Mapping[str, str]) -> int:
    def size(name: str) -> int:
        return int(environment.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))

    for name in _ONE:
        if size(name) != 1:
            raise SmeltError(
                f"accelerate is told to split a model by {name} ({size(name)}), which training here does not; set it to 1"
            )
    replicas, shards = size("DP_REPLICATE"), size("DP_SHARD")
    if replicas * shards != count:
        raise SmeltError(
            f"accelerate is told {replicas} copies over {shards} processes each, but {count} processes were started; make"
            " the product of dp_replicate_size and dp_shard_size their number"
        )
    return replicas


def _is_on(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "false").lower() in ("true", "1", "yes")

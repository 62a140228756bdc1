"""How trained weights are distributed over processes, as set by accelerate's launcher.

The launcher's environment is read by accelerate itself, which is imported only for several processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ...system.errors import SmeltError

_FULLY_SHARDED = "ACCELERATE_USE_FSDP"
_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
# accelerate settings that are not supported here, and must not be ignored silently.
_REFUSED = {
    "FSDP_OFFLOAD_PARAMS": "offloading weights to main memory",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


@dataclass(frozen=True)
class Arrangement:
    """How trained weights are distributed over processes.

    Attributes:
        replicas: number of copies; each is sharded over the same number of processes.
        reshard: free a block's weights after each pass, and gather them again for its gradients.
    """

    replicas: int
    reshard: bool = True

    @classmethod
    def of_launcher(cls, count: int) -> Arrangement:
        """The settings of ``accelerate launch`` in the environment; by default a copy for each process.

        Args:
            count: number of processes.

        Raises:
            SmeltError: it asks for something unsupported, or for another number of processes.
        """
        from accelerate.utils import parse_flag_from_env

        for variable, what in _REFUSED.items():
            if parse_flag_from_env(variable):
                raise SmeltError(
                    f"accelerate's configuration asks for {what} ({variable}), which Smelt's training does not support; turn it off"
                )
        mixed = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if mixed != "no":
            raise SmeltError(
                f"accelerate's configuration has mixed_precision: {mixed}; Smelt trains in the model's dtype; set it to no"
            )
        if parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING"):
            raise SmeltError(
                "accelerate's configuration asks for activation checkpointing; set checkpointing: true in the recipe instead"
            )
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false"
        if parse_flag_from_env(_PARALLELISM):
            return cls(_replicas(count), reshard)
        if not parse_flag_from_env(_FULLY_SHARDED):
            return cls(count)
        if os.environ.get("FSDP_VERSION", "2") != "2":
            raise SmeltError("accelerate's configuration asks for FSDP 1; set fsdp_version: 2 there")
        return cls(1, reshard)


def _replicas(count: int) -> int:
    from accelerate.parallelism_config import ParallelismConfig

    try:
        asked: Any = ParallelismConfig()
    except ValueError as error:
        raise SmeltError(f"accelerate refuses its own parallelism configuration: {error}") from None
    if asked.non_dp_dim_names:
        name = asked.non_dp_dim_names[0]
        size = getattr(asked, f"{name}_size")
        raise SmeltError(
            f"accelerate's configuration asks for {name.upper()} parallelism ({size}), which Smelt's training does not support; set it to 1"
        )
    replicas, shards = asked.dp_replicate_size, asked.dp_shard_size
    if asked.total_size != count:
        raise SmeltError(
            f"accelerate's configuration asks for {replicas} copies sharded over {shards} processes each, but {count} processes were started; make"
            " the product of dp_replicate_size and dp_shard_size their number"
        )
    return replicas

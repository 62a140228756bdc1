"""How models are laid out over several devices, a file each: replicas, pipelines, separate prefill and decode."""

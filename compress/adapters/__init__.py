"""LoRA adapters of compressed checkpoints: merging one into the weights that it was trained on."""

"""LoRA adapters of compressed checkpoints: merging one into the weights it was trained on."""

"""Distillation and quantization-aware training. Nothing is implemented here yet; see CHANGELOG.md."""

"""Smelt inside other libraries: transformers, peft and lm-eval."""

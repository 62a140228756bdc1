"""Accuracy and speed of checkpoints, measured on the runtime that serves them."""

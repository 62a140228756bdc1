"""Structures that can be removed from a model, and the resulting smaller model."""

"""Losses between a student and its teacher, with their gradients."""

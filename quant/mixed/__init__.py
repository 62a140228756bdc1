"""Choosing a number format for every part of a model, so that it loses least at a size or a speed."""

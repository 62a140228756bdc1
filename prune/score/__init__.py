"""Importance scores of weights, units, directions and blocks."""

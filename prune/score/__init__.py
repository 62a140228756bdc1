"""Importance scores of weights, units, hidden states, experts and blocks."""

"""Allocation: how much to remove from each layer."""

"""Manners of HTTP: errors, limits, keys, events."""

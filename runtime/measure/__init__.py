"""Measuring an engine: speed, where a step's time goes, and what each fusion buys."""

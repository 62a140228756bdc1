"""Attention over a paged cache: prompts, single tokens, and rows of scores."""

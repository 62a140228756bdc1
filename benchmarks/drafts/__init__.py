"""Speculative decoding: what drafters gain, and what their forms lose."""

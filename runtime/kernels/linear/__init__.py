"""Linears of dense, packed and 8-bit weights, and what belongs to them."""

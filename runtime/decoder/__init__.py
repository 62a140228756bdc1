"""The decoder: one model for all architectures, computed with plain torch or with faster operators."""

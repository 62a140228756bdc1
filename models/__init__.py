"""Any Hugging Face model directory: what its files say, checked once for all that read them."""

from __future__ import annotations

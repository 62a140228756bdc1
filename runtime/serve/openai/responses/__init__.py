"""``/v1/responses`` without stored state."""

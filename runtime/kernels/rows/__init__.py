"""What happens to rows: norms, rounding, rotary positions and cache writes, sampling, losses."""

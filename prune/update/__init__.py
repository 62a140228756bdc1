"""Updates: how the remaining weights compensate for removed ones."""

"""Settings of pruning, one file a structure. None of this imports torch."""

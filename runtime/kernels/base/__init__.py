"""A kernel's launch, its targets, and what every kernel brings along to be checked."""

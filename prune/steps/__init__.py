"""The prune steps of a recipe, one file a structure."""

"""The prune steps of a recipe, one file per structure."""

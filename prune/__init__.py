"""Pruning (structure x score x update). Nothing is implemented here yet; see CHANGELOG.md."""

"""The runtime that serves compressed checkpoints. Nothing is implemented here yet; see CHANGELOG.md."""

"""What drafts with weights, loaded and checked against the model that verifies."""

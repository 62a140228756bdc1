"""What can be removed from a model, and the smaller model that is left."""

"""Steps that use several of the top-level packages."""

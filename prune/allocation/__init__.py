"""How much to remove from which layer."""

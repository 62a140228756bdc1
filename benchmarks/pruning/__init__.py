"""What pruning costs, and what it saves."""

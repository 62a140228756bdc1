"""What needs a GPU; everything here skips without one."""

"""The options of each rounding method, a file each, which recipes check without importing torch."""

"""The options of each transform, a file each, which recipes check without importing torch."""

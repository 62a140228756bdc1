"""The options of losses that have any, a file each, which recipes check without importing torch."""

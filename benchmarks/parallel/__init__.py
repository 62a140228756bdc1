"""Models on several processes, or larger than the memory."""

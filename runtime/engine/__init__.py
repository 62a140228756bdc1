"""Requests, the scheduler, the block cache, and the executors that carry out its plans."""

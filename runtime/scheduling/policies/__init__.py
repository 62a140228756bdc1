"""Scheduling policies, one file each: which requests start next, which run first, and which are preempted. They touch no tensor."""

"""Pruning: what to remove (structure), how to rank it (score), how to compensate for it (update).

This package works on tensors and modules, not on recipes, files or servers.
"""

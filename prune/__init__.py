"""Pruning: what to remove (structure), how to rank it (score), how to make up for it (update).

This room knows tensors and modules. It knows nothing of recipes, files or servers.
"""

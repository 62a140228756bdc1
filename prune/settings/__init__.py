"""Settings of pruning, one file per structure. They do not import torch."""

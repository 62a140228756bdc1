"""Several processes that compute one model together, on torch.distributed."""

"""The scheduler and the block cache, which touch no tensor: engine and simulator share them."""

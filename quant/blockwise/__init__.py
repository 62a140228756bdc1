"""The calibration loop: quantizing a model block by block, each block reading what those before it produce."""

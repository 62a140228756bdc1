"""The plot of accuracy against speed or size."""

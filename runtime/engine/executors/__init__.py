"""What carries out the steps that a scheduler plans: torch and the native kernels, or a GPU."""

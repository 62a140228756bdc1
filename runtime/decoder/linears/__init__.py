"""Linears on plain torch and oneDNN, and the input embedding."""

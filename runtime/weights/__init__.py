"""Weights as a checkpoint stores them, read for the decoder."""

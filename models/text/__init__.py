"""Text for calibration, training and evaluation: where it comes from, and windows of token ids cut from it."""

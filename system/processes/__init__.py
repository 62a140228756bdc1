"""Other processes: those that calibrate and train together, and those that this one starts."""

"""Cache blocks on the device and in host memory, counted and found again. Touches no tensor."""

"""Several engines behind one address, on Ray Serve."""

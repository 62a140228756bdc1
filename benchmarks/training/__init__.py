"""What training wins back, and how fast it is."""

"""What a checkpoint claims of itself in its ``smelt.json``, and measuring it again."""

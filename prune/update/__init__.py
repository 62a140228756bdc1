"""How what is left makes up for what was removed."""

"""The processes of an engine: what each has in memory, and what they send each other."""

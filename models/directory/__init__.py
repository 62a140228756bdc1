"""A model directory: its configuration, whether its files agree, and the model that it describes without weights."""

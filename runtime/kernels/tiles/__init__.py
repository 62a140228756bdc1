"""How launches are cut into programs: shipped tables and rules."""

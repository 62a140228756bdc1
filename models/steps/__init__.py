"""What every step of a recipe has in common: the Step interface, its finished parts and records."""

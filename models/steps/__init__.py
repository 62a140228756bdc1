"""What every step of a recipe has in common: the Step protocol, its finished parts and records."""

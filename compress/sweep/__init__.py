"""Many recipes from one file: the trials, running them in order or on Ray, and one report of all."""

"""Recipes: the schema, and reading YAML files."""

"""Outputs that follow a schema, an expression or a grammar, through llguidance."""

"""How much a weight, a unit, a direction or a block matters."""

"""Options of the rounding methods, one file per method; recipes validate them without importing torch."""

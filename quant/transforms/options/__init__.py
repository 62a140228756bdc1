"""Options of the transforms, one file per transform; recipes validate them without importing torch."""

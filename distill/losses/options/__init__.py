"""Options of losses, one file per loss with options; recipes validate them without importing torch."""

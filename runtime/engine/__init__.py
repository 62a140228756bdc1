"""The engine: requests come in, its scheduler plans steps, an executor carries them out."""

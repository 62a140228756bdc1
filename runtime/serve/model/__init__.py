"""A served model: its prompts, what it must follow, and requests that run."""

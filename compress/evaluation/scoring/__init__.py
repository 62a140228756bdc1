"""What is scored: texts and tasks, by an engine, a model or a server."""

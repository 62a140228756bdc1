"""Other inference runtimes on a CPU: a file a runtime, all measured alike."""

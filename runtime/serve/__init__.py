"""Checkpoints behind the HTTP APIs that clients of OpenAI, Anthropic and vLLM speak."""

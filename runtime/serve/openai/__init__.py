"""OpenAI's APIs, with vLLM's additional fields."""

"""vLLM for CPUs, in an environment of its own: `make test-vllm`."""

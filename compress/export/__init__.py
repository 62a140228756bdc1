"""Carrying a quantized checkpoint over into formats that other programs read: GPTQ, AWQ, GGUF, or plain weights."""

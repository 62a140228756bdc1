"""Speculative decoding: a drafter proposes tokens, and the model verifies several in one step."""

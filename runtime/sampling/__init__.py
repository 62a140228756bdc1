"""From logits to tokens, on the host."""

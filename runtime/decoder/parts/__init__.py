"""What layers are made of and read: operators, attention, the KV cache, the batch of a step."""

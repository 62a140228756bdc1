"""What a decoder is made of: its blocks, its linears, and which module feeds which."""

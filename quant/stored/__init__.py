"""What a compressed checkpoint holds: codes and scales on disk, `quantization_config`, and the way back to weights."""

"""What is known of devices, as YAML with a source for every constant."""

"""What an engine is set up from: its configuration, the loaded model, and room for cache blocks in host memory."""

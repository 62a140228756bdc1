"""Watching a server: metrics and traces."""

"""Requests: sampling parameters, a request and its sequences, streamed text, outputs."""

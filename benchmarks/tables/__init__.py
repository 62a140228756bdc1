"""The tables of README and docs, written from ``benchmarks/results``: a file a subject, a function a table."""

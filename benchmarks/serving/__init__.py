"""Claims of the papers on serving, each simulated with Smelt's scheduler: docs/serving-study.md."""

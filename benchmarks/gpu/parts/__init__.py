"""The jobs of the stages: each module lists the cases of one subject."""

"""Whether what an evaluation says can be trusted, and how many items that takes."""

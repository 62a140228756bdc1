"""Whether two versions of Smelt write the same bytes: for refactorings."""

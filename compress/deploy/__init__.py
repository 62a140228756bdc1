"""Handing a checkpoint over to other engines: what they refuse, and the files that start them."""

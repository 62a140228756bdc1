"""Running a model of any size block by block, forwards and backwards."""

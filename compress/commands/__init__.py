"""Commands of the command line that have a subject of their own."""

"""What needs a GPU: run.sh checks every kernel there, then times them."""

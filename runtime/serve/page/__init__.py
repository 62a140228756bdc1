"""The files of the server's live page."""

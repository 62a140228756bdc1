"""What is compared with what: scripts, and their results as JSON with the command, the machine and the date."""

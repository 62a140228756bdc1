"""What number formats and the ways to reach them cost in accuracy, time and memory, beside other tools."""

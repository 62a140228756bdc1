"""What a report holds: measurements, intervals, and changes against the baseline."""

"""Reports for people, made from a report's data: one self-contained HTML page."""

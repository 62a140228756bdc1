"""The HTML page of a report, one file a section: numbers as plain data, which the templates lay out."""

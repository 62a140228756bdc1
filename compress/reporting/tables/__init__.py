"""A report's tables, which its page and its Markdown show."""

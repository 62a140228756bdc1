"""The markup of reports as Jinja2 templates, and what fills them."""

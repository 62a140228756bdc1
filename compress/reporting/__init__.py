"""Human-readable reports, made from a report's data: Markdown and one self-contained HTML page."""

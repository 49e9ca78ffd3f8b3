"""Building blocks of reports: HTML pages, figures and Markdown tables."""

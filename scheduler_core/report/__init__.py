"""What the reports of all commands are made of: HTML pages, figures, tables and sections in Markdown."""

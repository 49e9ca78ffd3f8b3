"""What a person looks at: figures, HTML pages, timelines for a trace viewer. Needs matplotlib, imported when drawing."""

"""Commands, options, files, tables, JSON text, processes: what surrounds the decisions."""

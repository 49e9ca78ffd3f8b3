"""Importers of lengths that others measured, into our two schemas: production logs, serving traces, public sets."""

"""Importers of output lengths from production logs, serving traces and public data sets to samples/2 and trace/1."""

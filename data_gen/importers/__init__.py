"""Lengths that others measured: public sets, serving traces and production logs, into our two schemas."""

from data_gen.importers.run import ImportOptions, ImportReport, import_lengths

__all__ = ["ImportOptions", "ImportReport", "import_lengths"]

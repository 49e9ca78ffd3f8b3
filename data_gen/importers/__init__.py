"""Importers of lengths that others measured, into our two schemas: production logs, serving traces, public sets."""

from data_gen.importers.import_lengths import IMPORTERS, ImportOptions, ImportReport, import_lengths

__all__ = ["IMPORTERS", "ImportOptions", "ImportReport", "import_lengths"]

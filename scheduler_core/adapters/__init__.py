"""Policies inside engines that form their batches themselves; an engine is imported only where it is used."""

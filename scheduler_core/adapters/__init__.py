"""Our order at work inside engines that keep their own batch former; an engine is imported only where it is used."""

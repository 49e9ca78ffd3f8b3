"""Adapters for engines and routers of other projects, which are only imported when an adapter is used."""

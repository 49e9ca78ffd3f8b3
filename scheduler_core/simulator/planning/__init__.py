"""Search for the cheapest deployment that meets targets, from a log of requests."""

"""State of one engine: waiting and running requests, KV blocks, step plans, the decision log."""

"""OpenAI-compatible proxy in front of an engine: parse, predict, order, route, relay, log.

A request goes through `parsing` and the rules for clients in `engines`, `prediction`, `order`, `engines` (the order as the
engine understands it) and `relay` with `responses`; `feedback` logs it. `server` has all of it, and the ports.
"""

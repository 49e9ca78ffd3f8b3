"""OpenAI-compatible proxy in front of an engine: parse, predict, order, route, relay, log.

A request passes through `parsing`, the client rules in `engines`, `prediction`, `order`, the hints in
`engines`, and `relay` with `responses`; `feedback` logs it. For policies that use sessions, `sessions` follows what it is a turn
of (`session_id`, `session_context`) and what the engine has cached (`engine_model`). `server` connects these parts and owns the ports.
"""

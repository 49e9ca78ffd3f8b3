"""OpenAI-compatible proxy in front of an engine: parse, predict, order, route, relay, log.

| step | module |
|---|---|
| parse | `parsing`, `engines` (rules for clients) |
| predict | `prediction` |
| order | `order` |
| route | `engines`: the order as the engine understands it |
| relay | `relay`, `responses` |
| log | `feedback`, `feedback_log`, `metrics` |
| all of it, and the ports | `server` |
"""

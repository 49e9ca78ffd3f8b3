"""A proxy before any engine that speaks the OpenAI API: it predicts, tells the engine, and keeps what came of it.

| module | what it is |
|---|---|
| `asked.py`, `members.py` | what a request asks for; reading its body, and adding members without touching the rest |
| `rules.py` | which hints of clients pass |
| `forecast.py` | asking a predictor within a deadline; without an answer the request goes on |
| `order.py`, `aged.py` | the policy's key of a request; ageing added to it |
| `engines/` | one file for each engine: how a key and a prediction become its hints |
| `holding.py` | the queue itself, for engines without hints |
| `tenants.py`, `tenant_file.py`, `shares.py` | limits by tenant; the file that names them; places shared out by weight |
| `headers.py`, `relay.py` | request and stream to and from the engine |
| `answers.py`, `lengths.py` | the true length of an answer that passes by |
| `feedback_log.py` | finished requests in segments of JSON lines |
| `handling.py`, `server.py` | one completion from end to end; the ports |
"""

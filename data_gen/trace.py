"""The trace schema `trace/1`: requests with their lengths and arrivals, for the simulator.

The simulator (`scheduler_core.simulator.trace.load_trace`) reads all of it, and needs the first five columns known:
arrival_s may be null only where it draws arrivals itself. Null is unknown. The tokens' unit is in the file's metadata under
`tailcast.tokens`.
"""

from __future__ import annotations

import pyarrow as pa

TRACE_SCHEMA_NAME = "trace/1"
TRACE_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),  # unique in the trace
        pa.field("arrival_s", pa.float64()),  # from the first request
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32(), nullable=False),  # at least 1
        pa.field("max_tokens", pa.int32()),
        pa.field("tier", pa.int32()),  # urgency, 0 is the most urgent
        pa.field("tenant", pa.string()),  # sender: a user, a session, an application
        pa.field("prompt_id", pa.string()),
        pa.field("prompt", pa.string()),  # the user's text
        pa.field("model", pa.string()),
        pa.field("category", pa.string()),  # kind of request
    ],
    metadata={b"tailcast.schema": TRACE_SCHEMA_NAME.encode()},
)

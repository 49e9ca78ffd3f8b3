"""The trace schema `trace/1`: requests with their lengths and arrivals, for the simulator.

| column | type | meaning |
|---|---|---|
| request_id | string | unique in the trace |
| arrival_s | double or null | seconds from the first request; null if the source has no arrivals |
| prompt_tokens | int32 or null | length of the prompt; null if unknown |
| output_tokens | int32 | length of the output, at least 1 |
| max_tokens | int32 or null | maximum number of output tokens; null if unknown |
| tier | int32 or null | urgency, 0 is the most urgent |
| tenant | string or null | sender: a user, a session, an application |
| prompt_id | string or null | identifier of the prompt |
| prompt | string or null | the user's text |
| model | string or null | served model |
| category | string or null | kind of request |

The simulator (`scheduler_core.simulator.trace.load_trace`) reads all of it, and needs the first five known:
arrival_s may be null only where it draws arrivals itself. The tokens' unit is in the file's metadata under
`tailcast.tokens`.
"""

from __future__ import annotations

import pyarrow as pa

TRACE_SCHEMA_NAME = "trace/1"
TRACE_SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("arrival_s", pa.float64()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32()),
        pa.field("tier", pa.int32()),
        pa.field("tenant", pa.string()),
        pa.field("prompt_id", pa.string()),
        pa.field("prompt", pa.string()),
        pa.field("model", pa.string()),
        pa.field("category", pa.string()),
    ],
    metadata={b"tailcast.schema": TRACE_SCHEMA_NAME.encode()},
)

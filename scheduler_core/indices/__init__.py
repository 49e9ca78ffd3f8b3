"""Numbers that policies order by, each computed from what is known about one request or from recent history.

`length_table`: remaining length and Gittins rank of a predicted length. `boost`: boosts of known and of predicted work.
`work_rate`, `tail_rate`, `virtual_fcfs`, `prediction_bias`, `coverage`: running estimates.
"""

from __future__ import annotations

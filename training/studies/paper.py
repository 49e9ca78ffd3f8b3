"""What the paper (TIE) reports of its own 1,000 LMSYS prompts, 100 answers each by Llama-3-8B-Instruct.

Shown beside results on other data, under its own heading, never mixed with them.
"""

from __future__ import annotations

SOURCE = "TIE, 1,000 LMSYS-Chat-1M prompts, 100 answers each, Llama-3-8B-Instruct"
#: Table 1: share of prompts with KS p > 0.05, by the label of the family.
KS_PASS_RATE = {
    "log_t": 0.906,
    "log_t_free": 0.931,
    "log_normal": 0.603,
    "gamma": 0.320,
    "weibull": 0.190,
    "exponential": 0.107,
}
#: Section 3.1: means over the prompts.
HEAVY_TAIL = {
    "skewness": 3.10,
    "cv": 1.09,
    "top_decile_share": 0.357,
    "p90_over_p50": 4.62,
    "p99_over_p50": 10.77,
}
#: Appendix D.3: the degrees of freedom with the highest mean KS p among 1 to 10.
BEST_NU = 3.5
#: Appendix D.2: answers per prompt that it settles on.
NUM_SAMPLES = 20

"""Shared by all tests: no network, few threads, and how Hypothesis chooses its examples.

The environment variable HYPOTHESIS_PROFILE is `ci` (the default) or `explore`. Tests that set their own number of
examples inherit everything else from the profile.
"""

import os

from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# A Ray cluster of tests writes no token into the home folder and reports to nobody.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.pop("RAY_ADDRESS", None)

# No test may depend on how fast the machine is, so neither profile looks at the clock.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
# The same examples in every run, and nothing remembered: what is green stays green until something is changed.
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
# Other examples in every run, more of them, and failures are remembered in .hypothesis.
settings.register_profile("explore", derandomize=False, max_examples=400, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

"""What Ray itself warns of."""

import pytest

RAY_WARNINGS = pytest.mark.filterwarnings(
    "ignore:Tip. In future versions of Ray:FutureWarning",
    "ignore:subprocess .* is still running:ResourceWarning",
    "ignore:unclosed:ResourceWarning",
)

"""The labeled texts of tailcast's seed set, as JSON lines; see `docs/urgency.md` for the rubric."""

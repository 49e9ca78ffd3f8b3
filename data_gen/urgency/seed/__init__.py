"""The labeled texts of tailcast's seed set, as JSON lines; `docs/urgency.md` has the rubric."""

"""The labelled texts of tailcast's own seed set, as JSON lines; `docs/urgency.md` is their rubric."""

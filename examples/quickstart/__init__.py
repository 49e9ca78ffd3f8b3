"""The main job end to end on real input: each step runs a tailcast command as a user would."""

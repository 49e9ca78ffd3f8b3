"""The main workflow end to end on real data; each step runs a tailcast command."""

"""Sub-commands of `simulate`, one module each."""

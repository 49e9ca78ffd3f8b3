"""What Triton's Python backend runs; copied into a repository, where nothing of tailcast is installed."""

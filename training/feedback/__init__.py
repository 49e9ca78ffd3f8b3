"""The proxy's log of finished requests, for drift and for comparing two artifacts on live traffic."""

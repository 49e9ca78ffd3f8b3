"""Training of the predictor's network: data, losses, loops."""

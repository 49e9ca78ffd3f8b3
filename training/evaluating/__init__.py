"""How good predictors are: metrics, baselines, noise ceiling, report."""

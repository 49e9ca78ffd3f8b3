"""Post-hoc calibration: shift and scale of predicted distributions, and conformal quantiles."""

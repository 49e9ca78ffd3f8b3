"""Post-hoc calibration: shift and stretch of predicted distributions, and conformal quantiles."""

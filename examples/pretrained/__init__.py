"""Training of the predictors that are shipped with tailcast."""

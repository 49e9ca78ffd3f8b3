"""How the predictor that ships with tailcast is made."""

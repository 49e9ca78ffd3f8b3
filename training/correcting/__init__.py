"""Corrections of predictors after training, from recorded lengths."""

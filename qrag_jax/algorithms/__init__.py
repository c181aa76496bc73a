"""Algorithms as pure functions, and the return estimators that they share."""

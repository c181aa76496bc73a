"""Evaluators: they turn parameters into named scores."""

"""Metrics of retrieval and of answers, and the logs they are computed from; without JAX."""

"""Samples, their sources, tokenisation and the input pipeline."""

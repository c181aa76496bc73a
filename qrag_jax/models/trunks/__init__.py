"""Transformer trunks, each with its table of weight names."""

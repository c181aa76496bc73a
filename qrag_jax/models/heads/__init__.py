"""Heads on a trunk: at present only the text embedding."""

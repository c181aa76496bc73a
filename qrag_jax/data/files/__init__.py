"""Readers of the files that samples come from."""

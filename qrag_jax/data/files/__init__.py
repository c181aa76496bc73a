"""The files that samples come from."""

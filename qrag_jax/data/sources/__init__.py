"""The data sets, one module each, and their registry."""

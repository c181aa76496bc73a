"""Encoders: trunks, heads, what they compute with, and their files."""

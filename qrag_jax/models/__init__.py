"""Encoders: trunks, heads, their building blocks, and their files."""

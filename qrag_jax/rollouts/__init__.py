"""Weights and a batch become scored experience."""

"""Rollouts: weights and a batch of questions become scored experience."""

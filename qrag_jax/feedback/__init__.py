"""Rewards: from the supporting facts, or from a language model."""

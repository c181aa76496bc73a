"""Agents that answer a question by searching a corpus in several steps."""

"""Agents that answer a question with tools: they search documents and say when they are done."""

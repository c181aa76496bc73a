"""The cases of the retrieval suite."""

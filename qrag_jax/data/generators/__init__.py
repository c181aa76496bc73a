"""Generators of documents and questions."""

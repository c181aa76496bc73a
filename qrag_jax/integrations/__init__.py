"""Adapters: a search as the retriever of another library, one module for each library."""

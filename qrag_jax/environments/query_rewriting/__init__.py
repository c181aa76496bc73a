"""DeepRetrieval's environment: one query in, one rewritten query out."""

"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries."""

"""LeReT (arXiv 2410.23214): a language model learns to write queries from preferences."""

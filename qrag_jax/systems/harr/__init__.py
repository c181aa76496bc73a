"""HARR (arXiv 2602.03645): a query encoder learns inside an agent that searches."""

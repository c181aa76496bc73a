"""RLVR (github.com/bdsaglam/rlvr): a language model learns to search with tools."""

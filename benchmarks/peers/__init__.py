"""PyTorch versions of what is benchmarked, on the same tensors and weights; imports torch."""

"""The peers of the benchmarks: PyTorch code on the same tensors and weights; imports torch."""

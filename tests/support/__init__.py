"""What tests and benchmarks share: small models, peers in PyTorch and TRL, readers of HLO."""

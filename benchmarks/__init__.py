"""What is measured, against what, and how to run it: python -m benchmarks --suite NAME."""

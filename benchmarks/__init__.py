"""The benchmarks of the package; `python -m benchmarks --suite NAME` runs one suite."""

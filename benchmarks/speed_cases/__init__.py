"""The cases of the speed suite, one module for each task that is timed."""

"""The cases of the speed suite, a file for each thing that takes time."""

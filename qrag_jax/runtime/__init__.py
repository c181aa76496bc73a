"""Code with side effects: devices, files, checkpoints, locks, metric writers, command lines."""

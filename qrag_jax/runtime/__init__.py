"""Devices, checkpoints, metric writers: the effects at the edge."""

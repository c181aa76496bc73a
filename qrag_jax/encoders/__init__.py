"""Flax text encoders and their pretrained weights."""

"""Learners: the formulas of an algorithm become an update on the mesh."""

"""Starts, watches and stops a model server, and hands it weights."""

"""Starts, watches and stops a model server, and loads new weights into it."""

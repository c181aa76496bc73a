"""Asks a model server, on pooled connections, with retries and a cache."""

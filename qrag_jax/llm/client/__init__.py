"""The client of a model server, with pooled connections, retries and a cache."""

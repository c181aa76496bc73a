"""The environment of query writers: a model writes one query a hop, whose passages join a pool."""

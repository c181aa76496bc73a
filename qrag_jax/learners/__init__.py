"""A formula becomes an update on the mesh."""

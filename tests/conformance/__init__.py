"""What every member of a family does: each is tested by registering it."""

"""Answer and ranking metrics in plain Python."""

"""What a model is asked, and what is read from its answers."""

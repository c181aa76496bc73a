"""From parameters to named scores."""

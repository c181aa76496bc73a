"""What stands on a trunk: today one text embedding."""

"""How actions are scored and drawn."""

"""Client and server of a language model that runs beside the trainer; never imports jax."""

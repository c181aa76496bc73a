"""Client and server of a language model that runs next to the trainer; never imports jax."""

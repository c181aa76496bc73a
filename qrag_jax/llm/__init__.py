"""Language models beside the trainer, asked over HTTP; never imports jax."""

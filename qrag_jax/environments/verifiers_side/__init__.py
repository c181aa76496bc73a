"""The program that plays environments of `verifiers`; it imports nothing else of qrag_jax."""

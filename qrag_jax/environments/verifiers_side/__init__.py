"""The program that plays environments of the package `verifiers`, in a process of its own.

It runs in a Python that has `verifiers`, and imports nothing else of qrag_jax: the trainer starts
it by its path. Both speak lines of JSON (`program`).
"""

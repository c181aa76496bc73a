"""Search services on the web: a query goes out, ranked ids of documents or a failure come back."""

"""Documents and questions that the program makes itself."""

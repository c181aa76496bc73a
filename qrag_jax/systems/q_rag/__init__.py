"""Q-RAG (arXiv 2511.07328): two towers take the chunks of a document one by one."""

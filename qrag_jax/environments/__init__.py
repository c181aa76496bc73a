"""Decision processes a retriever acts in."""

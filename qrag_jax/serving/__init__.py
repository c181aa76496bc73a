"""Serves a search to other programs: over HTTP, and as a tool of language models over MCP."""

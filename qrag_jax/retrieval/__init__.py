"""Search over a corpus: what every engine offers, and the engines."""

"""The parts of the encoders suite, one module each."""

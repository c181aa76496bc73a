"""The parts of the encoders suite, a module each."""

"""The parts of the suite which: settings, rows, scores and tables."""

"""One file per model family: its configuration and its weight names."""

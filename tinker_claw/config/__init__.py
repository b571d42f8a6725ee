"""Settings: one frozen tree, read from command line, environment and file."""

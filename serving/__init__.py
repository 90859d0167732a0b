"""The command line and its commands: everything with a clock, a screen or a user's files."""

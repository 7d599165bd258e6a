"""Find and load a user's code: a file, or an entry point of a distribution."""

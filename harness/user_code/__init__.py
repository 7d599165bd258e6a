"""Finds, checks and runs a user's code: a file, or an entry point of an installed distribution."""

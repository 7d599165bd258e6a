"""Code that is not ours, found and loaded: a file that a user names, an entry point of a distribution."""

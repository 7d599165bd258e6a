"""Safe file names for any text, and safe reading of files that a user names."""

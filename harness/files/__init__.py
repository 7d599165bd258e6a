"""Safe file names for arbitrary names, and safe reads of files that a user names."""

"""Make safe file names of arbitrary names, and read files that a user names safely."""

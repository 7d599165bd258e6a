"""Convert any name to a safe file name, and read files that a user names safely."""

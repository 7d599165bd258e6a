"""Files by names of others, and files that a user names."""

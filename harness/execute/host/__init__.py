"""The host and what is forked from it: it imports torch once, has steps traced, and forks ranks."""

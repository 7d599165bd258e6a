"""The host process, which imports torch once, and its forks: stages, which trace steps, and ranks, which run them."""

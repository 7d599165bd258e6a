"""The host process, which imports torch once and forks all others: stages, which trace steps, and ranks, which run
them."""

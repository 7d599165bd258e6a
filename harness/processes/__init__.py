"""Forks and starts processes, and watches them: no other package does so."""

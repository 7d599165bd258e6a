"""Implement the commands, one in each module; `harness.cli` declares their options and calls them."""

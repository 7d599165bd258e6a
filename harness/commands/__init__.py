"""Implement the commands, a module each; `harness.cli` declares their options and calls them."""

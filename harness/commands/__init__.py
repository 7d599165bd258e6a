"""The implementation of each command, one module per command; `harness.cli` declares their options and calls them."""

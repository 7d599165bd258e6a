"""The implementation of the commands, a module each; `harness.cli` declares their options and calls them."""

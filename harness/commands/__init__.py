"""What each command does, one module a command; `harness.cli` declares their options and calls them."""

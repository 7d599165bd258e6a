"""The passes, each in a module with the name of the pass."""

"""Values exchanged between two sides of a step, to verify a cause: see docs/explanation/causes.md."""

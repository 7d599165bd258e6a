"""Verify a cause by exchanging values between the two systems: see docs/explanation/causes.md."""

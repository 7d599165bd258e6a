"""Localize a difference: find the operator call to blame in the first step whose records differ."""

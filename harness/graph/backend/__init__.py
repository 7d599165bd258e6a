"""Runs a finished graph directly or compiled."""

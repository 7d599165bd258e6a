"""Converts a user's objects to programs for a proof: functions, modules, graphs and exported files."""

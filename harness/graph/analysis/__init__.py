"""Analyses that passes use: dependencies between calls, modules that mix rows, memory."""

"""Analyses that passes use: dependencies, mixing of rows, memory."""

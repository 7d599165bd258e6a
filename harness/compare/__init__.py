"""Compares two recordings exactly: pairs records by full key, judges, and describes in bits how two tensors differ."""

"""Compare two recordings exactly: pair by full key, judge, and describe in bits how two tensors differ."""

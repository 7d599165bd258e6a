"""Compare two recordings, exactly: pair by full key, judge, and say in bits how two tensors differ."""

"""Compare two recordings exactly: pair their records, decide the verdict, and describe in bits how two tensors
differ.
"""

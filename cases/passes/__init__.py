"""Families of cases that add a single pass to the pipeline of a chunked step. The pass must not change a bit."""

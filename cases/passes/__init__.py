"""Families of cases that add one pass of the pipeline to a chunked step, which must not change a bit."""

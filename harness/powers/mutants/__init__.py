"""Mutation testing of bitproof itself: inject faults into cases, and check that each is detected and located."""

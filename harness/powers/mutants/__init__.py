"""Mutation testing of bitproof itself: injects faults into cases, and checks that each is detected and located."""

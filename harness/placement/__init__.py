"""Placements of tensors on the ranks, chosen by a linear program over a traced step.

problem     nodes with candidate choices, edges with costs, and a bound on memory
"""

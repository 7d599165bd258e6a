"""Placements of tensors on the ranks, chosen by a linear program over a traced step.

strategies  what DTensor's sharding propagator says that an operator can do on a line of ranks, and what it costs
            to bring a tensor from one placement to another
program     nodes that each get one of their candidates, edges with costs, a bound: and what brute force makes of it
build       a traced step as such a program
solve       its optimum, by HiGHS; where a bound cannot be kept, the least that can
"""

"""Choose placements of tensors on the ranks, by a linear program over a traced step.

problem     nodes with candidate choices, edges with costs, and a bound on memory
build       a traced step as such a problem
strategies  the strategies of each operator on a line of ranks, by DTensor's sharding propagator, and the costs
            of converting between placements
solve       the optimum, by HiGHS; if the bound cannot be met, the least memory that any choices need
"""

"""bitproof checks whether a graph pipeline computes exactly the same bits as eager execution.

Importing this package does not import torch, so that the command line answers at once. ARCHITECTURE.md describes the
packages in the order in which data flows through them.
"""

__version__ = "0.2.0"

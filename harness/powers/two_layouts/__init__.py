"""Cases whose systems divide tensors differently among ranks: compare their parts, and bound the effect of rounding."""

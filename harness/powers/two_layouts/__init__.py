"""Cases whose systems divide tensors differently among ranks: compare the parts of tensors, and bound the effect of
rounding.
"""

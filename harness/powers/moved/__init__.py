"""Finds the calls whose bits change between two environments, and checks whether they explain the whole difference.

An environment is a Python with torch, for example before and after an upgrade of torch.
"""

"""Baselines: stored recordings by environment. Later runs are compared with baselines, and a difference can be
accepted.
"""

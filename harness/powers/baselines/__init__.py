"""Baselines: store recordings by environment, measure how far later runs drift from them, and accept a drift."""

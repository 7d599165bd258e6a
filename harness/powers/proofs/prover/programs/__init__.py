"""A user's objects as programs for a proof: functions, modules, graphs, exported files, and graphs before and after a
pass.
"""

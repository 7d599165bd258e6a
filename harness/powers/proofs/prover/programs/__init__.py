"""A user's objects as programs that can be proved: functions, modules, graphs, files, and graphs within a pass."""

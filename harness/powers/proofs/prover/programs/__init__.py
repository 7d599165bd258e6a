"""A user's objects as programs for a proof: functions, modules, graphs, exported files, graphs around a pass."""

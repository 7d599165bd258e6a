"""Powers: additional abilities of bitproof, each in a folder of its own that the core never imports.

A power brings its check or command with their options, its records and its part of the reports. The core finds it by
name (`harness.checks.shipped`, `harness.checks.power_modules`, `harness.cli.command_table`), so a run that does not use
a power does not load it.
"""

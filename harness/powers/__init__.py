"""Powers: additional abilities of bitproof, such as baselines. Each is a folder here, which the core never imports.

A power contains its check or command, its command-line options, its records, and the code for its part of the reports.
The core lists checks and commands by name (`harness.checks.shipped`, `harness.checks.power_modules`,
`harness.cli.command_table`) and imports a power only for a run that uses it.
"""

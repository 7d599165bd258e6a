"""The checks of a case that ship with the core: `case_checks.py` is the table of them."""

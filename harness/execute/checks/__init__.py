"""The checks that come with bitproof; `case_checks.py` is the table of them."""

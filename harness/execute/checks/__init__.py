"""The checks that come with bitproof; `case_checks.py` lists them."""

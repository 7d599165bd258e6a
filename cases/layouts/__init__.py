"""Families of cases whose two systems use different layouts for the same training, or run it in different processes."""

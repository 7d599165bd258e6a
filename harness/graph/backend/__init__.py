"""A finished graph made to run: as it is, or compiled."""

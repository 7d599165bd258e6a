"""Families of cases whose two systems lay the same training out in other ways, or run it in other processes."""

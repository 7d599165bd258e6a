"""The only package that forks, starts, watches and ends processes."""

"""The only package that forks or starts processes: their channels, watchers, logs and ends."""

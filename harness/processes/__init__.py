"""The only package that forks or starts a process: their channels, who watches them, their logs, their end."""

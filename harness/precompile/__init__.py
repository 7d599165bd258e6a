"""A case's step, made in one process without ranks and read by all: its file, its fingerprint, making and reading."""

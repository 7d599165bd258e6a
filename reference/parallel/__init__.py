"""Distributes parameters and tokens over ranks: the mesh, its process groups, FSDP, tensor and expert parallelism."""

"""Distributes parameters and tokens over ranks: the mesh, its process groups, FSDP and expert dispatch."""

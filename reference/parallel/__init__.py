"""How parameters and tokens are spread over ranks: the mesh, its process groups, FSDP and expert dispatch."""

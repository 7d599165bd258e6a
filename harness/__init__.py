"""bitproof: does a graph pipeline compute exactly what eager computes, bit for bit?

Importing this package loads no torch: the command line must answer at once.
Read the modules in the order the data flows; ARCHITECTURE.md gives the map.
"""

__version__ = "0.2.0"

"""Programs that run in either environment, by path: they import the standard library and torch alone.

The other environment may have another Python and another torch, and no bitproof. `start.py` is the file to run. For
example, `python start.py replay DIR OUT.json` replays an archive.
"""

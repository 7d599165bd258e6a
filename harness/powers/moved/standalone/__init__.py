"""Programs that run in either environment, by path: they import the standard library and torch alone.

The other environment may have another Python and torch, and no bitproof. `answer_request.py` is the file to run. For
example, `python answer_request.py replay REQUEST.json ANSWER.json` replays an archive.
"""

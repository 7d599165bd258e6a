"""Programs that run in both environments, by their path: they import only the standard library and torch.

The new environment may have another Python and torch, and no bitproof. `answer_request.py` is the file to run.
"""

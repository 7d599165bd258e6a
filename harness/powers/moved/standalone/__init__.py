"""Programs that run in both environments by their path, and import only the standard library and torch.

The new environment may have another Python and torch, and no bitproof. The file to run is `answer_request.py`.
"""

"""Code that runs in both environments, started by its path. It imports only the standard library and torch.

The new environment may have another Python and torch, and no bitproof. The file to run is `answer_request.py`.
"""

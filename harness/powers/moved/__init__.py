"""Find the operator calls whose bits change between two environments, and whether these calls are all that changed.

An environment is a Python with a torch, such as the one before an upgrade. Command: `moved` (`cli`). `standalone` runs
in either environment; `two_environments` asks both and joins the answers in a certificate (`records`), which
`certificate_text` prints.
"""

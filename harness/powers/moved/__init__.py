"""Which operator calls change their bits between two environments, and whether these calls are all that changed.

Command: `moved` (`cli`). `standalone` runs in either environment; `two_environments` asks both and joins the
answers in a certificate (`records`), which `certificate_text` prints.
"""

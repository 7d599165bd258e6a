"""Find the operator calls whose bits change between two environments, and check if these explain the whole difference.

An environment is a Python with a torch, for example before and after an upgrade of torch. The command is `bitproof
moved` (`cli`). `standalone` runs in both environments. `two_environments` sends requests to both and joins the answers
in a certificate (`records`), which `certificate_text` prints.
"""

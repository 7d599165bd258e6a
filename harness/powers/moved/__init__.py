"""Find the operator calls whose bits change between two environments, and check if these explain the whole difference.

An environment is a Python with a torch, for example before and after an upgrade of torch.

- `cli`: the command `bitproof moved`.
- `standalone`: programs that run in both environments.
- `two_environments`: sends requests to both, and joins the answers in a certificate (`records`).
- `certificate_text`: prints the certificate.
"""

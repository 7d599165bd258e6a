"""Write results into a run folder: report.json has everything, and every other form is made from the same records.

Reads records only; imports rich only inside the functions that need it.
"""

from __future__ import annotations

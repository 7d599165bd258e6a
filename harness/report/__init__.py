"""Turn results into a run folder: report.json is the truth, every other form is made from it.

Reads records only, and imports pandas and rich inside the functions that need them.
"""

from __future__ import annotations

"""Turn results into a run folder: report.json is the truth, every other form is made from it.

Reads records only, and imports rich inside the functions that need it.
"""

from __future__ import annotations

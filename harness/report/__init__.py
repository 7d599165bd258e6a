"""Write results into a run folder. report.json has everything; every other form shows parts of the same records.

This package reads records only, and imports rich only inside the functions that need it.
"""

from __future__ import annotations

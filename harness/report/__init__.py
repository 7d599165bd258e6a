"""Write results into a run folder. report.json has everything; every other form shows parts of the same records.

Reports are made only from records (`harness.records`). rich is imported only inside the functions that need it.
"""

from __future__ import annotations

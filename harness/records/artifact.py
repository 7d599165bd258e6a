"""The report's facts about a precompiled step. Ranks read such a step from a file, and trace nothing."""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A training step that was compiled in advance.

    - `fingerprint`: identifies everything that the step was made from.
    - `content`: the sha256 of the body of the step's file.
    - `nodes`: the number of nodes of its graph.
    - `groups`: the number of process groups that ranks must make.
    - `compiled`: the sha256 of the code that a backend generated, None without a backend.
    """

    __pydantic_config__ = GROWING

    fingerprint: str
    content: str
    case: str
    system: str
    ranks: Count
    nodes: Count
    groups: Count
    bytes: Count
    compiled: str | None = None

    def describe(self, role: str) -> str:
        """Return the sentence about this step that reports print. `role` is the role of the system that read the
        step.
        """
        code = f", and ran its compiled code, sha256 {self.compiled}, compiling nothing" if self.compiled else ""
        return (
            f"{role}: its ranks read a precompiled step, and traced none: {self.system} of {self.case} for "
            f"{self.ranks} ranks, {self.nodes} nodes, {self.bytes / 2**20:.2f} MiB, "
            f"fingerprint {self.fingerprint}{code}"
        )

"""What a run says of the precompiled step that its ranks read from disk."""

from __future__ import annotations

from dataclasses import dataclass

from bitproof.harness.ulps import Count
from bitproof.harness.validate import GROWING


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A precompiled step. `fingerprint` names everything that decides it, `content` is the sha256 of its file's body.

    `nodes` are its graph's, `groups` the process groups that it has ranks make; `compiled` is the sha256 of the code
    that a backend compiled of it, None where the graph runs as it is.
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

    def tell(self, role: str) -> str:
        """What reports say of it beside a case, one side of which read it."""
        code = f", and ran its compiled code, sha256 {self.compiled}, compiling nothing" if self.compiled else ""
        return (
            f"{role}: its ranks read a precompiled step, and traced none: {self.system} of {self.case} for "
            f"{self.ranks} ranks, {self.nodes} nodes, {self.bytes / 2**20:.2f} MiB, "
            f"fingerprint {self.fingerprint}{code}"
        )

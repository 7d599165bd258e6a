"""What must hold of the graph between any two passes."""

from __future__ import annotations

from torch.fx import GraphModule

from harness.errors import PassError
from harness.graph.origin import META_KEY


def verify(module: GraphModule) -> None:
    """Raise PassError unless nodes stand in topological order and every call has a `val` and an origin."""
    try:
        module.graph.lint()
    except RuntimeError as error:
        raise PassError("the graph is malformed", expected="topological order", found=str(error)) from error
    for node in module.graph.nodes:
        if node.op == "call_function" and not {"val", META_KEY} <= node.meta.keys():
            raise PassError(
                f"node `{node.name}` ({node.target}) lacks metadata",
                expected=f"'val' and {META_KEY!r} in node.meta",
                found=", ".join(sorted(node.meta)) or "nothing",
            )

"""`keeps_bits` proves that the graph after a pass computes the same bits as the graph before it.

    @bitproof.keeps_bits                            a pass on a graph or a graph module, in place or not
    def fold(graph): ...

    torch._inductor.config.post_grad_custom_pre_pass = bitproof.keeps_bits(fold)

    with bitproof.keeps_bits() as kept:             all of Inductor's own passes, by name
        torch.compile(model)(x)

Both graphs are proved with the same layouts of inputs, which come from `inputs` or from the metadata of placeholders
before the pass. If Inductor finds a graph in its cache, no pass runs, and nothing is proved.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, overload

from torch.fx import Graph, GraphModule

from bitproof.harness.errors import PassError
from bitproof.harness.machine.determinism import Switches, keeping_switches
from bitproof.harness.powers.proofs.prover.answers import BUFFER, PARAMETER, PROVED, REFUSED
from bitproof.harness.powers.proofs.prover.graphs.calls_only import why_not_calls_only
from bitproof.harness.powers.proofs.prover.graphs.constants import digest_of
from bitproof.harness.powers.proofs.prover.graphs.export import RefusedError
from bitproof.harness.powers.proofs.prover.pairs import PairProof, refusal_text
from bitproof.harness.powers.proofs.prover.programs.compared_run import check_run, not_run
from bitproof.harness.powers.proofs.prover.programs.provable import ConvertedProgram, convert, is_plain
from bitproof.harness.powers.proofs.prover.programs.reachable import has_values
from bitproof.harness.powers.proofs.prover.programs.subjects import prove_converted
from bitproof.harness.runtime.sources import own_digest
from bitproof.harness.torch_compat import disable_current_modes
from bitproof.harness.torch_inductor import passes_watched, takes_as_hook

SHOWN = 3
"""The maximum number of outputs in the error about a pass."""


@dataclass(frozen=True)
class PassProof:
    """The proof that a pass kept a graph's bits. `changed` states whether the pass changed any node."""

    name: str
    proof: PairProof
    changed: bool


@dataclass
class KeptPasses:
    """The proofs of all passes that ran within a `keeps_bits()` block, in the order in which the passes ended."""

    proofs: list[PassProof] = field(default_factory=list)

    def check(self) -> None:
        """Raise PassError for the first pass that is not proved to keep every bit, if there is any."""
        for each in self.proofs:
            if each.proof.verdict != PROVED:
                raise _failure(each)


@overload
def keeps_bits(a_pass: Callable[..., Any], *, inputs: Sequence[Any] | None = None) -> KeptPass: ...


@overload
def keeps_bits(a_pass: None = None, *, check: bool = True) -> Any: ...


def keeps_bits(
    a_pass: Callable[..., Any] | None = None, *, inputs: Sequence[Any] | None = None, check: bool = True
) -> Any:
    """Wrap a pass so that it raises PassError, naming the node, unless its result is proved equal to its input.

    Without a pass, return a context that proves Inductor's own passes. It yields KeptPasses.

    - `inputs`: the inputs of the graph. By default, their layouts come from the graph's placeholders.
    - `check`: only for the context. At its end, it raises PassError for the first pass that is not proved.
    """
    if a_pass is None:
        return _watching(check)
    takes_as_hook(KeptPass)
    return KeptPass(a_pass, inputs)


class KeptPass:
    """A wrapped pass. Each time it runs, its result is proved equal to its input.

    It can be a hook for Inductor, whose cache identifies it by `uuid`.
    """

    def __init__(self, a_pass: Callable[..., Any], inputs: Sequence[Any] | None = None) -> None:
        self._pass = a_pass
        self._inputs = inputs
        self.proofs: list[PassProof] = []
        self.__name__ = str(getattr(a_pass, "__name__", type(a_pass).__name__))
        self.__doc__ = a_pass.__doc__

    def __call__(self, graph: Graph | GraphModule, *args: Any, **kwargs: Any) -> Any:
        """Run the pass on a graph, and return its result.

        Raises PassError unless the pass is proved to keep every bit.
        """
        before = _Snapshot(graph, self._inputs)
        with keeping_switches(f"pass {self.__name__}"):
            found = self._pass(graph, *args, **kwargs)
        # A pass may return a new graph, or change the graph in place and return something else.
        left = found if isinstance(found, Graph | GraphModule) else graph
        proof = before.proof(self.__name__, left)
        self.proofs.append(proof)
        if proof.proof.verdict != PROVED:
            raise _failure(proof)
        return found

    def uuid(self) -> Any:
        """Return a digest that identifies the pass for Inductor's cache.

        It covers bitproof's source, and the pass's own `uuid()` or else the source of the pass. None if these do not
        determine what the pass does: Inductor then caches no graph.
        """
        own = getattr(self._pass, "uuid", None)
        try:
            pass_identity = own() if callable(own) else inspect.getsource(self._pass)
        except (OSError, TypeError):
            return None
        text = f"{own_digest()} {pass_identity}" if pass_identity is not None and not _has_state(self._pass) else None
        return text and hashlib.sha256(text.encode()).hexdigest()


def _has_state(a_pass: Any) -> bool:
    # A closure or an object may have state that its source does not show.
    return not hasattr(a_pass, "uuid") and bool(getattr(a_pass, "__closure__", None) or not inspect.isfunction(a_pass))


class _Snapshot:
    """A copy of a graph before a pass, and of the process's switches, such as torch's number of threads.

    `_before` is the graph as a program, or the error if the graph is refused.
    """

    def __init__(self, graph: Graph | GraphModule, inputs: Sequence[Any] | None) -> None:
        self._inputs = list(inputs) if inputs is not None else None
        self._text = _text(graph)
        self._before = self._program_of(graph)
        self._state = _digests(self._before)
        with disable_current_modes():  # Inductor runs its passes under fake tensors
            self._switches = Switches.now()

    def proof(self, name: str, graph: Graph | GraphModule) -> PassProof:
        with disable_current_modes():
            switched = self._switches.changes()
            # Both graphs are proved under the switches from before the pass.
            self._switches.restore()
        after, changed = self._program_of(graph), self._text != _text(graph)
        if switched:
            reason = f"the pass changes what holds for the whole process: {'; '.join(switched)}"
            return PassProof(name, PairProof(REFUSED, reason=reason), changed)
        for side in (self._before, after):
            if isinstance(side, RefusedError):
                return PassProof(name, PairProof(REFUSED, reason=refusal_text(side)), changed)
        assert isinstance(self._before, ConvertedProgram) and isinstance(after, ConvertedProgram)
        # The proof reads parameters as inputs, so a pass that changes their values must be refused separately.
        state = _digests(after)
        if written := [x for x in self._state if state.get(x, self._state[x]) != self._state[x]]:
            reason = f"the pass changes the values of {written[0]}, which is an input of the program"
            return PassProof(name, PairProof(REFUSED, reason=reason), changed)
        with disable_current_modes():
            return PassProof(name, prove_converted(self._before, after), changed)

    def _program_of(self, graph: Graph | GraphModule) -> ConvertedProgram | RefusedError:
        module = graph if isinstance(graph, GraphModule) else graph.owning_module
        try:
            if module is None:
                raise RefusedError("a graph that no module holds", where="the pass")
            if otherwise := why_not_calls_only(module):
                raise RefusedError(f"a graph that is run with {otherwise}", where="the whole graph")
            with disable_current_modes():
                if self._inputs is None:
                    self._inputs = _inputs_of(module)
                # A copy, whose code is generated again: a pass may leave `recompile` to its caller, and the caller may
                # change the graph later.
                own = module.graph if isinstance(graph, GraphModule) else graph
                found = convert(GraphModule(module, _copy(own)), self._inputs)
                found.program.exported  # noqa: B018  the graph's present state
                # A graph with Python calls may trace differently from its run, so it is really run, too.
                if not is_plain(module) and not_run(found) is None:
                    check_run(found)
                # Without its subject it is only a graph, which need not be run again.
                found = replace(found, subject=None)
        except RefusedError as error:
            return error
        return found


def _digests(found: ConvertedProgram | RefusedError) -> dict[str, str]:
    values = {} if isinstance(found, RefusedError) else found.values
    with disable_current_modes():
        kept = {name: x for name, x in values.items() if name.startswith((PARAMETER, BUFFER)) and has_values(x)}
        return {name: digest_of(x.detach()) for name, x in kept.items()}


def _copy(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def _text(graph: Graph | GraphModule) -> list[str]:
    nodes = (graph.graph if isinstance(graph, GraphModule) else graph).nodes
    return [f"{x.op} {x.name} {x.target} {x.args} {x.kwargs}" for x in nodes]


def _inputs_of(module: GraphModule) -> list[Any]:
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val", node.meta.get("example_value"))
        if value is None:
            what = f"placeholder `{node.name}` has no meta['val']: give keeps_bits the graph's inputs"
            raise RefusedError(what, where="the graph's inputs")
        found.append(value)
    return found


@contextmanager
def _watching(check: bool) -> Iterator[KeptPasses]:
    kept = KeptPasses()
    # A stack, since a pass may run other passes.
    running: list[_Snapshot] = []

    def before(module: Any, name: str) -> None:
        running.append(_Snapshot(module, None))

    def after(module: Any, name: str) -> None:
        kept.proofs.append(running.pop().proof(name, module))

    with passes_watched(before, after):
        yield kept
    # Only after the block, so that `kept` has the proofs of all passes.
    if check:
        kept.check()


def _failure(found: PassProof) -> PassError:
    lines = [] if found.proof.reason is None else [found.proof.reason]
    others = [answer for answer in found.proof.answers if answer.verdict != PROVED]
    for answer in others[:SHOWN]:
        why = answer.meaning or answer.reason
        lines.append(f"{answer.output}: {answer.verdict}" + (f": {why}" if why else ""))
        lines += [f"  seen to differ: {answer.witness}"] if answer.witness else []
        lines += [f"  {line}" for line in answer.finding.lines()] if answer.finding else []
    more = f"\n    and {len(others) - SHOWN} more outputs" if len(others) > SHOWN else ""
    return PassError(
        f"pass {found.name} is not proved to keep every bit",
        expected="every output PROVED equal to what came in",
        found="\n    ".join([found.proof.verdict, *lines]) + more,
    )

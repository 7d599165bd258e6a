"""What bitproof uses of Inductor, all of it private to torch: compiling a graph, and loading what was compiled.

A part of `torch_compat.py`, and under its rule: no other module touches Inductor. Loading it takes seconds, which a
rank that runs a graph as it is need not spend, so each function here loads it when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

from torch._guards import TracingContext, tracing
from torch.fx import GraphModule

from bitproof.harness.torch_compat import FakeTensorMode


def compile_whole_graph(module: GraphModule, values: list[Any]) -> Callable[[list[Any]], Any]:
    """A graph of lowered operators as one compiled function; within `compiling`. Raises what Inductor raises."""
    from torch._inductor.compile_fx import compile_fx_inner

    return cast(Any, compile_fx_inner(module, values))


def inductor_backend(
    finished: Callable[[GraphModule, str], GraphModule],
    compiled: Callable[[Callable[[], Callable[..., Any]], GraphModule, str], Callable[..., Any]],
) -> Callable[..., Any]:
    """torch.compile's backend "inductor", which hands over each graph before it compiles it.

    `finished` takes the graph and its direction and gives the one to compile; `compiled` is called with what compiles
    it, with it and its direction, and gives what is to be called with a list of inputs. Nothing is read from a cache,
    whose graphs would not pass through it.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(module: GraphModule, inputs: Any, **settings: Any) -> Callable[..., Any]:
        direction = "backward" if settings.get("is_backward") else "forward"
        module = finished(module, direction)
        return compiled(lambda: cast(Any, compile_fx_inner)(module, inputs, **settings), module, direction)

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        with config.patch(enable_autograd_cache=False):
            return cast(Any, compile_fx)(module, inputs, inner_compile=inner)

    return backend


def lowering_decompositions() -> Mapping[Any, Any]:
    """How operators are written in those that Inductor lowers."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compiling(fake_mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Where Inductor finds the fake tensors' mode, and with it the symbols of data-dependent sizes."""
    return tracing(TracingContext(fake_mode))


@contextmanager
def inductor_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Inductor set up so, as far as this release has the settings."""
    from torch._inductor import config

    with config.patch({name: value for name, value in settings.items() if hasattr(config, name)}):
        yield


def takes_as_hook(kind: type) -> None:
    """Let Inductor take objects of this class as hooks of its own, which its cache asks for their `uuid`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(kind)


@contextmanager
def passes_watched(before: Callable[[Any, str], None], after: Callable[[Any, str], None]) -> Iterator[None]:
    """The hook that gets each of Inductor's passes over a graph, with the graph's module and name, at begin and end.

    A pass that is switched off is included, and one within another ends first.
    """
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    enter, leave = GraphTransformObserver.__enter__, GraphTransformObserver.__exit__

    def entering(own: Any) -> Any:
        before(own.gm, own.passname)
        return enter(own)

    def leaving(own: Any, kind: Any, error: Any, trace: Any) -> None:
        leave(own, kind, error, trace)
        after(own.gm, own.passname)

    with (
        mock.patch.object(GraphTransformObserver, "__enter__", entering),
        mock.patch.object(GraphTransformObserver, "__exit__", leaving),
    ):
        yield


def is_inductor_error(error: BaseException) -> bool:
    """Whether Inductor itself refused a graph."""
    from torch._inductor.exc import InductorError

    return isinstance(error, InductorError)


# What was compiled, as files.

BESIDE_THE_CODE = ("constants", "frozen_param_names", "torchbind_constants", "inputs_to_check")
"""What a compiled graph may need besides the code that was generated for it."""


class WouldCompileError(Exception):
    """Generated code asks for a kernel that is not among its files. The message names the kernel."""


def generated_module(compiled: Any) -> tuple[str, list[str]]:
    """The name of the module that a compiled graph calls, and what it needs besides that code, if anything."""
    return str(compiled.cache_key), [name for name in BESIDE_THE_CODE if getattr(compiled, name, None)]


def load_generated(file: Path) -> Callable[[list[Any]], Any]:
    """The step that a file of generated code defines: called with a list of inputs, which it empties.

    This runs the file. Its kernels are found in Inductor's folder (TORCHINDUCTOR_CACHE_DIR), by a hash of their source
    and of the compiler's whole command line, and so are the trials of the instructions that the compiler can use;
    nothing is compiled. Raises WouldCompileError for a kernel that is not there, and whatever the file raises.
    """
    from torch._inductor import codecache, cpp_builder

    def refuse(builder: Any) -> None:
        raise WouldCompileError(Path(builder.get_target_file_path()).name)

    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(cpp_builder.CppBuilder, "build", refuse))
        # A header is precompiled before a kernel is looked for, even where the kernel is there.
        if hasattr(codecache, "_precompile_header"):
            replaced.enter_context(mock.patch.object(codecache, "_precompile_header", lambda *given, **options: None))
        return cast(Callable[[list[Any]], Any], codecache.PyCodeCache.load_by_key_path(file.stem, str(file)).call)

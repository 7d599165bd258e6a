"""Compiles graphs with Inductor, and loads compiled code.

Inductor is private to torch, so no other module uses its names. It takes seconds to import; the functions here import
it when they are called.
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
    """Compile a graph into a function that takes a list of inputs.

    Call this within `compiling`. Raises Inductor's errors.

    The graph must contain only operators that Inductor can lower (see `lowering_decompositions`). `values` are the fake
    values of its inputs.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    return cast(Any, compile_fx_inner(module, values))


def inductor_backend(
    finished: Callable[[GraphModule, str], GraphModule],
    compiled: Callable[[Callable[[], Callable[..., Any]], GraphModule, str], Callable[..., Any]],
) -> Callable[..., Any]:
    """Return torch.compile's backend "inductor", with two callbacks for each graph. Cached graphs are not used.

    - `finished(graph, direction)`: returns the graph to compile. `direction` is "forward" or "backward".
    - `compiled(compile_it, graph, direction)`: returns the function to run, which takes a list of inputs. Calling
      `compile_it()` compiles the graph with Inductor and returns such a function.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(module: GraphModule, inputs: Any, **settings: Any) -> Callable[..., Any]:
        direction = "backward" if settings.get("is_backward") else "forward"
        module = finished(module, direction)
        return compiled(lambda: cast(Any, compile_fx_inner)(module, inputs, **settings), module, direction)

    def backend(module: GraphModule, inputs: Any) -> Callable[..., Any]:
        # A cached graph would bypass the callbacks.
        with config.patch(enable_autograd_cache=False):
            return cast(Any, compile_fx)(module, inputs, inner_compile=inner)

    return backend


def lowering_decompositions() -> Mapping[Any, Any]:
    """Return Inductor's decompositions: operator -> function that calls only operators that Inductor can lower."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compiling(fake_mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """Return a context in which Inductor uses this fake mode, and thereby its symbols for data-dependent sizes."""
    return tracing(TracingContext(fake_mode))


@contextmanager
def inductor_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Context with these Inductor settings. Settings that this release of torch does not have are ignored."""
    from torch._inductor import config

    with config.patch({name: value for name, value in settings.items() if hasattr(config, name)}):
        yield


def takes_as_hook(kind: type) -> None:
    """Allow objects of class `kind` as Inductor's graph passes. Inductor's cache identifies them by `kind.uuid()`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    CustomGraphPass.register(kind)


@contextmanager
def passes_watched(before: Callable[[Any, str], None], after: Callable[[Any, str], None]) -> Iterator[None]:
    """Context in which `before` and `after` are called around each pass of Inductor, with its graph module and name.

    Disabled passes are reported too. For nested passes, the inner `after` comes before the outer `after`.
    """
    from torch.fx.passes.graph_transform_observer import GraphTransformObserver

    enter, leave = GraphTransformObserver.__enter__, GraphTransformObserver.__exit__

    def entering(own: Any) -> Any:
        before(own.gm, own.passname)
        return enter(own)

    def leaving(own: Any, kind: Any, error: Any, trace: Any) -> None:
        # torch's own end of the pass comes first, so that `after` sees the pass complete.
        leave(own, kind, error, trace)
        after(own.gm, own.passname)

    with (
        mock.patch.object(GraphTransformObserver, "__enter__", entering),
        mock.patch.object(GraphTransformObserver, "__exit__", leaving),
    ):
        yield


def is_inductor_error(error: BaseException) -> bool:
    from torch._inductor.exc import InductorError

    return isinstance(error, InductorError)


# Compiled code as files.

BESIDE_THE_CODE = ("constants", "frozen_param_names", "torchbind_constants", "inputs_to_check")
"""Attributes of a compiled graph: objects that it may need besides its generated code."""


class WouldCompileError(Exception):
    """Raised if loaded code needs a kernel that is not compiled yet. The message is the kernel's file name."""


def generated_module(compiled: Any) -> tuple[str, list[str]]:
    """Return a pair: the name of a compiled graph's generated module, and the entries of `BESIDE_THE_CODE` that it
    needs.
    """
    return str(compiled.cache_key), [name for name in BESIDE_THE_CODE if getattr(compiled, name, None)]


def load_generated(file: Path) -> Callable[[list[Any]], Any]:
    """Load a compiled step from a file that Inductor generated. Nothing is compiled.

    The returned function takes a list of inputs, and empties the list. Raises WouldCompileError if a kernel is missing
    in Inductor's folder, and any error of the file itself.
    """
    from torch._inductor import codecache

    with _compiling_refused():
        return cast(Callable[[list[Any]], Any], codecache.PyCodeCache.load_by_key_path(file.stem, str(file)).call)


def compile_marked_regions(module: GraphModule, values: list[Any]) -> GraphModule:
    """Compile the regions that the metadata of nodes marks, so that `pickled_region` can store each.

    Call this within `compiling`. `values` are the fake values of the inputs. Inductor's own cache must be on, as torch
    makes a region's pickle from its cache entry. So Inductor's folder should be a new one.
    """
    from torch.fx.passes.regional_inductor import regional_inductor

    with inductor_settings({"fx_graph_cache": True}):
        return regional_inductor(module, *values)


def pickled_region(called: Any) -> bytes | None:
    """Return the pickle that torch makes of a compiled region, given the function that a graph calls for the region.

    None for any other function.
    """
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    region = getattr(called, "__wrapped__", None)
    return region.serialize() if isinstance(region, AOTCompiledArtifact) else None


def load_region(pickled: bytes) -> Callable[..., Any]:
    """Load a compiled region. A pickle may run any code.

    Raises WouldCompileError for a kernel that is not in Inductor's folder, and the pickle's own errors.
    """
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    with _compiling_refused():
        region = AOTCompiledArtifact.deserialize(pickled)
    # fx writes calls of functions only, and an artifact is a callable object.
    return lambda *inputs: region(*inputs)


@contextmanager
def _compiling_refused() -> Iterator[None]:
    from torch._inductor import codecache, cpp_builder

    # The folder also has small programs that show which instructions the compiler can use. Inductor finds programs and
    # kernels by a hash of their source and of the compiler's whole command line; it builds only what it does not find.
    def refuse(builder: Any) -> None:
        raise WouldCompileError(Path(builder.get_target_file_path()).name)

    with ExitStack() as replaced:
        replaced.enter_context(mock.patch.object(cpp_builder.CppBuilder, "build", refuse))
        # Inductor precompiles a header before it looks for a kernel, even if the kernel exists.
        if hasattr(codecache, "_precompile_header"):
            replaced.enter_context(mock.patch.object(codecache, "_precompile_header", lambda *given, **options: None))
        yield

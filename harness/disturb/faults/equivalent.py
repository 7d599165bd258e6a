"""Rewrites that keep every bit: bitproof must report no difference for any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import (
    ASYNC_TENSOR,
    BFLOAT16,
    CHUNKED,
    DENSE_TRAFFIC,
    EXPERTS,
    EXPORTED,
    FOLDED,
    LISTED,
    MICRO_BATCHES,
    OFFLOADS,
    PIECES,
    PIPELINED,
    Site,
    ranks,
    row,
)
from bitproof.harness.disturb.faults.micro_batches import DIVIDED, GATHERS_ONCE, SHARED

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import Call, GraphEditor
    from bitproof.harness.disturb.tamper import TamperedCall

EXACT = "ours: exact arithmetic, element by element"


def _activation(g: GraphEditor) -> Call:
    return g.find("silu")


@row(EXACT)
def activation_copied(g: GraphEditor) -> list[Site]:
    """an activation is copied."""
    g.after(_activation(g), "aten.clone.default")
    return []


@row(EXACT)
def activation_reshaped_and_back(g: GraphEditor) -> list[Site]:
    """an activation is flattened and then reshaped back."""
    node = _activation(g)
    flat = g.after(node, "aten.reshape.default", [-1])
    # The first size is left to `reshape`: an expert's number of rows is known only when the step runs.
    g.after(flat, "aten.reshape.default", [-1, *map(int, g.value(node).shape[1:])])
    return []


@row(EXACT)
def summands_exchanged(g: GraphEditor) -> list[Site]:
    """a + b becomes b + a, everywhere."""
    # `all` returns the calls of one direction.
    for node in [*g.all("add", direction="backward"), *g.all("add")]:
        # A sum with a number has a single input node. A number cannot be the first argument, so it is left out.
        if len(node.all_input_nodes) == 2 and g.is_floating(node):
            node.args = (node.args[1], node.args[0])
    return []


@row(EXACT)
def factors_exchanged(g: GraphEditor) -> list[Site]:
    """a * b becomes b * a, everywhere."""
    for node in [*g.all("mul", direction="backward"), *g.all("mul")]:
        if len(node.all_input_nodes) == 2 and g.is_floating(node):
            node.args = (node.args[1], node.args[0])
    return []


@row("ours: no other layer reads a layer's token counts", needs=(EXPORTED, CHUNKED, EXPERTS))
def tokens_of_a_layer_written_after_the_next_layer(g: GraphEditor) -> list[Site]:
    """a layer's token counts are written after those of the next layer."""
    written = g.all("copy_", r".*moe", chunk=1)
    g.require(written[1:], "two layers that count tokens").append(written[0])
    return []


@row("ours: a document may have any number that is its own", needs=(FOLDED,))
def documents_counted_from_elsewhere(g: GraphEditor) -> list[Site]:
    """the offsets of all documents in a row are increased by 7."""
    g.after(g.find("sub", "", where=lambda node: not g.is_floating(node)), "aten.add.Tensor", 7)
    return []


@row("ours: an accumulator that begins with zero; no loss is -0.0", needs=(PIECES,))
def losses_of_pieces_added_to_zero(g: GraphEditor) -> list[Site]:
    """the sum of the pieces' losses begins with zero instead of the first loss."""
    first = g.find("add", "output", where=lambda node: g.is_floating(node) and g.value(node).dim() == 0)
    g.before(first, first.args[0], "aten.add.Tensor", 0.0)
    return []


@row("ours: the projection's gradients of two pieces", needs=(PIECES,))
def pieces_projection_gradients_exchanged(g: GraphEditor) -> list[Site]:
    """the first two pieces' gradients of the vocabulary projection are added in exchanged order."""
    first = g.find("add", "output", where=lambda node: g.is_floating(node) and g.value(node).dim() == 2)
    first.args = (first.args[1], first.args[0])
    return []


@row("torchtitan #3434: what an overlap schedule does")
def waits_moved_late(g: GraphEditor) -> list[Site]:
    """each wait is moved to just before the first reader of its result."""
    # Positions before the first move: moved waits must not change which reader is the first.
    place = {node: index for index, node in enumerate(g.graph.nodes)}
    for wait in g.calls:
        if "wait_tensor" in str(wait.target) and wait.users:
            min(wait.users, key=place.__getitem__).prepend(wait)
    return []


@row("ours: prefetching")
def gathers_moved_early(g: GraphEditor) -> list[Site]:
    """parameters are gathered before anything else."""
    # Their casts move with them. The order of the gathers stays, so all ranks launch them in the same order.
    moved = []
    for node in [node for node in g.calls if "all_gather" in str(node.target)]:
        source = node.all_input_nodes[0]
        # A gather reads its parameter directly, or through one cast.
        if source.op == "placeholder":
            moved.append(node)
        elif source.all_input_nodes and source.all_input_nodes[0].op == "placeholder":
            moved += [source, node]
    last = g.graph.find_nodes(op="placeholder")[-1]
    # A cast that several gathers read moves once.
    for node in dict.fromkeys(moved):
        last.append(node)
        last = node
    return []


@row(EXACT)
def product_cut_and_joined(g: GraphEditor) -> list[Site]:
    """a product's rows are split in two and joined again."""
    node = g.find("mm", direction="forward")
    rows = int(g.value(node).shape[0])
    readers = list(node.users)
    # The slices read the product, too, so its readers were listed before.
    head = g.make_before(node.next, "aten.slice.Tensor", node, 0, 0, rows // 2)
    tail = g.make_before(head.next, "aten.slice.Tensor", node, 0, rows // 2, rows)
    joined = g.make_before(tail.next, "aten.cat.default", [head, tail])
    for reader in readers:
        reader.replace_input_with(node, joined)
    return []


@row(EXACT)
def negated_twice(g: GraphEditor) -> list[Site]:
    """an activation is negated twice."""
    g.after(g.after(_activation(g), "aten.neg.default"), "aten.neg.default")
    return []


@row(EXACT)
def multiplied_by_one(g: GraphEditor) -> list[Site]:
    """an activation is multiplied by 1."""
    g.after(_activation(g), "aten.mul.Scalar", 1.0)
    return []


@row(EXACT)
def doubled_and_halved(g: GraphEditor) -> list[Site]:
    """an activation is doubled and then halved."""
    g.after(g.after(_activation(g), "aten.mul.Scalar", 2.0), "aten.mul.Scalar", 0.5)
    return []


@row(EXACT, needs=(BFLOAT16,))
def widened_and_narrowed(g: GraphEditor) -> list[Site]:
    """an activation in bfloat16 is cast to float32 and back."""
    wide = g.after(_activation(g), "aten._to_copy.default", dtype=g.dtype("float32"))
    g.after(wide, "aten._to_copy.default", dtype=g.dtype("bfloat16"))
    return []


@row("ours: no collective in flight", needs=(ASYNC_TENSOR,))
def tensor_collectives_awaited_at_once(g: GraphEditor) -> list[Site]:
    """each collective over tensor ranks is awaited where it is launched."""
    # The group's name is the last argument of a launch.
    launches = [node for node in g.calls if str(node.args[-1:]) == "('tp',)" and "chunk" in node.meta]
    g.require(launches, "collectives over tensor ranks in chunks")
    for launch in launches:
        launch.append(g.wait_of(launch))
    return []


@row("ours: no reduction beside compute", needs=(DENSE_TRAFFIC,))
def reductions_moved_to_the_end(g: GraphEditor) -> list[Site]:
    """gradients are reduced after all else, in the same order."""
    output = g.graph.output_node()
    for launch in g.launches("reduce_scatter_tensor", "backward"):
        # Every call that depends on the reduction must move with it.
        late, waiting = {launch}, [launch]
        while waiting:
            late.update(users := [user for user in waiting.pop().users if user not in late])
            waiting += users
        # In the order of the graph, so that each call stays after its inputs.
        for node in [node for node in g.calls if node in late]:
            output.prepend(node)
    return []


@row("ours: another depth of prefetch and of deferral", needs=(OFFLOADS,))
def copies_started_where_they_are_read(g: GraphEditor) -> list[Site]:
    """copies from host memory start only when their results are read, and copies to host memory may take until then."""
    reloads = [node for node in g.calls if str(node.target).startswith("bitproof.reload.")]
    g.require(reloads, "an offloaded activation")
    for reload in reloads:
        [wait] = reload.users
        wait.prepend(reload.args[0])
        wait.prepend(reload)
    return []


@row("ours: another choice of what is saved", needs=(LISTED,))
def saved_product_computed_again(g: GraphEditor) -> list[Site]:
    """a matrix product that is saved is recomputed, too."""
    again = set(g.recomputed())
    # A saved product is read by recomputed calls without being recomputed itself.
    for node in g.all("mm", where=lambda node: node not in again):
        if readers := [reader for reader in node.users if reader in again]:
            copy = g.make_before(readers[0], node.target, *node.args)
            for reader in readers:
                reader.replace_input_with(node, copy)
            return []
    return g.require([], "a saved matrix product that a recomputed call reads")


@row("ours: recomputation")
def computed_twice(g: GraphEditor) -> list[Site]:
    """an activation is computed twice, and its last reader reads the second result."""
    node = _activation(g)
    again = g.make_before(node, node.target, *node.args, **node.kwargs)
    reader = list(node.users)[-1]
    reader.replace_input_with(node, again)
    return []


@row("ours")
def dead_call(g: GraphEditor) -> list[Site]:
    """a call is added that nothing reads."""
    g.make_before(_activation(g).next, "aten.exp.default", _activation(g))
    return []


@row(EXACT)
def negative_subtracted(g: GraphEditor) -> list[Site]:
    """a + b becomes a - (-b)."""
    node = g.find("add", where=lambda node: len(node.all_input_nodes) == 2 and g.is_floating(node))
    negative = g.make_before(node, "aten.neg.default", node.args[1])
    g.instead(node, "aten.sub.Tensor", node.args[0], negative)
    return []


@row(EXACT)
def transposed_twice(g: GraphEditor) -> list[Site]:
    """a product is transposed twice."""
    node = g.find("mm")
    g.after(g.after(node, "aten.t.default"), "aten.t.default")
    return []


@row(EXACT)
def activation_in_place(g: GraphEditor) -> list[Site]:
    """silu overwrites a copy of its input in place."""
    node = _activation(g)
    copy = g.make_before(node, "aten.clone.default", node.args[0])
    g.instead(node, "aten.silu_.default", copy)
    return []


@row(EXACT)
def rows_reversed_twice(g: GraphEditor) -> list[Site]:
    """rows are reversed twice."""
    g.after(g.after(_activation(g), "aten.flip.default", [0]), "aten.flip.default", [0])
    return []


@row("FSDP with and without casting before communication", needs=(BFLOAT16,))
def cast_after_the_gather(g: GraphEditor) -> list[Site]:
    """a parameter is gathered in float32 and then cast."""
    node = g.find("all_gather_into_tensor", where=lambda node: "_to_copy" in str(node.args[0]))
    cast, wait = node.args[0], g.wait_of(node)
    node.args = (cast.args[0], *node.args[1:])
    g.after(wait, "aten._to_copy.default", **cast.kwargs)
    return []


@row("ours: DDP against FSDP", needs=(ranks(2),))
def all_reduce_for_reduce_scatter(g: GraphEditor) -> list[Site]:
    """a gradient is all-reduced in rank order, and each rank keeps its own rows of the sum."""
    node = g.find("reduce_scatter_tensor", direction="backward")
    wait = g.wait_of(node)
    whole = g.make_before(node, "_c10d_functional.all_reduce.default", node.args[0], "sum", node.args[3])
    done = g.make_before(wait, "_c10d_functional.wait_tensor.default", whole)
    # args[2:4] are the size and the group of the reduce-scatter.
    g.instead(wait, g.kernel("own_rows"), done, *node.args[2:4])
    # A node can be erased only once it has no readers: its wait was the last.
    g.graph.erase_node(node)
    return []


@row(EXACT, needs=(EXPERTS,))
def counts_through_float64(g: GraphEditor) -> list[Site]:
    """integer counts are cast to float64 and back."""
    node = g.find("sum", ".*router", where=lambda node: not g.is_floating(node))
    wide = g.after(node, "aten._to_copy.default", dtype=g.dtype("float64"))
    g.after(wide, "aten._to_copy.default", dtype=g.dtype("int64"))
    return []


@row("ours: only time differs", needs=(ranks(2),))
def late_on_one_rank(g: GraphEditor) -> list[Site]:
    """the last rank is late for a collective."""
    node = g.find("reduce_scatter_tensor", direction="backward")
    g.before(node, node.args[0], g.kernel("slept_on_last_rank"))
    return []


@row(EXACT, needs=(CHUNKED,))
def joined_in_two_steps(g: GraphEditor) -> list[Site]:
    """chunks are joined in two steps."""
    node = g.require(g.joins(), "chunks that are joined")
    first, second = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    size = g.value(second).shape[dim]
    # A new `cat` joins the first half and the head of the second. The old call then adds the tail.
    head = g.make_before(node, "aten.slice.Tensor", second, dim, 0, int(size) // 2)
    tail = g.make_before(node, "aten.slice.Tensor", second, dim, int(size) // 2, int(size))
    joined = g.make_before(node, "aten.cat.default", [first, head], dim)
    node.args = ([joined, tail], *node.args[1:])
    return []


@row("ours: foreach against single tensors", operators=("_fused_adamw_",))
def optimizer_one_parameter_a_call(call: TamperedCall) -> Any:
    """AdamW is called once per parameter, starting at the last."""
    # Lists have an entry for each parameter; an empty list stands for state that this AdamW does not keep.
    lists = [value for value in call.args if isinstance(value, (list, tuple))]
    # No parameter's update reads another parameter, so the order of the calls changes no bit.
    for index in reversed(range(len(lists[0]))):
        args = [[value[index]] if isinstance(value, (list, tuple)) and value else value for value in call.args]
        call.function(*args, **call.kwargs)
    call.fire()


@row("ours: only the order of work differs", runner=True, needs=(MICRO_BATCHES,))
def forwards_before_backwards(step: Any) -> None:
    """a rank runs all forwards first, then all backwards."""
    # Sorting is stable, so forwards and backwards each keep their order.
    step.actions = tuple(sorted(step.actions, key=lambda action: bool(action.half == "backward")))


@row(EXACT, runner=True, needs=(MICRO_BATCHES,))
def gradients_added_in_place(step: Any) -> None:
    """gradients of micro-batches are added in place, in the first gradient's memory."""
    step.add = lambda total, gradient: total.add_(gradient)


@row(EXACT, runner=True, needs=(MICRO_BATCHES,))
def micro_batches_summands_exchanged(step: Any) -> None:
    """a micro-batch's gradient g is added as g + sum instead of sum + g."""
    step.add = lambda total, gradient: gradient + total


@row("ours: only the order of work differs", runner=True, needs=(MICRO_BATCHES, DIVIDED))
def weights_after_all_inputs(step: Any) -> None:
    """a rank computes all gradients of weights at the end of the step."""
    # Sorting is stable, so the weights keep the order of micro-batches.
    step.actions = tuple(sorted(step.actions, key=lambda action: bool(action.part == "weights")))


@row(EXACT, runner=True, needs=(MICRO_BATCHES, GATHERS_ONCE))
def gathered_twice_a_step(step: Any) -> None:
    """what runs once a step runs twice, and its second results are used."""
    own = step.run_once
    step.run_once = lambda *given: (own(*given), own(*given))[1]


@row(EXACT, runner=True, needs=(PIPELINED, SHARED))
def shared_gradients_doubled_and_halved(step: Any) -> None:
    """gradients of a shared parameter are doubled, added over stages and halved."""
    own = step.join

    def join(gradients: Any) -> Any:
        return {name: x / 2 for name, x in own({name: 2 * x for name, x in gradients.items()}).items()}

    step.join = join


@row(EXACT, runner=True, needs=(MICRO_BATCHES,))
def kept_values_copied(step: Any) -> None:
    """values that forward keeps for backward are copied."""
    own = step.taken
    step.taken = lambda action: {name: x.clone() if hasattr(x, "clone") else x for name, x in own(action).items()}


@row(EXACT, runner=True, needs=(PIPELINED,))
def messages_copied(step: Any) -> None:
    """messages between stages are copied before they are sent."""
    own = step.send
    step.send = lambda action, index, value: own(action, index, value.clone())


@row(EXACT, runner=True, needs=(PIPELINED, BFLOAT16))
def messages_in_float32(step: Any) -> None:
    """stages send float32 and cast received values back."""
    import torch

    send, receive = step.send, step.receive

    def narrowed(sender: Any, index: int, crossing: Any) -> Any:
        # The receiver allocates its buffer as the crossing says, so that must be float32, too.
        return receive(sender, index, replace(crossing, dtype=torch.float32)).to(crossing.dtype)

    step.send = lambda action, index, value: send(action, index, value.float())
    step.receive = narrowed


@row(EXACT, runner=True, needs=(PIPELINED,))
def messages_in_two_parts(step: Any) -> None:
    """stages send an activation in two parts along its positions, and join the received parts."""
    import torch

    send, receive = step.send, step.receive

    def sent(action: Any, index: int, value: Any) -> None:
        # Twice as many messages, so each gets an index of its own.
        for part, half in enumerate(value.chunk(2, 1)):
            send(action, 2 * index + part, half)

    def joined(sender: Any, index: int, crossing: Any) -> Any:
        rows, size, *others = crossing.shape
        half = replace(crossing, shape=(rows, size // 2, *others))
        return torch.cat([receive(sender, 2 * index + part, half) for part in range(2)], 1)

    step.send, step.receive = sent, joined


@row("ours: only time differs", runner=True, needs=(PIPELINED,))
def late_with_a_message(step: Any) -> None:
    """every rank sleeps before it sends a message."""
    import time

    own = step.send

    def send(*args: Any) -> None:
        time.sleep(0.02)
        own(*args)

    step.send = send


@row(EXACT, runner=True, needs=(PIPELINED,))
def messages_doubled_and_halved(step: Any) -> None:
    """stages double a value before sending it and halve it after receiving it."""
    send, receive = step.send, step.receive
    step.send = lambda action, index, value: send(action, index, value * 2)
    step.receive = lambda *args: receive(*args) * 0.5

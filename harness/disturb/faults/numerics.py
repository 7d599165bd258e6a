"""Faults that compute nearly the same values: by another formula, dtype, order or rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.entry import BFLOAT16, EXPERTS, FLOAT32, SDPA, Site, row

if TYPE_CHECKING:
    from bitproof.harness.disturb.graph_editor import GraphEditor

ATTEND = "_scaled_dot_product_flash_attention_for_cpu"
NORM = r".*norm"
SCALED = "attention whose scale is another than 1 / sqrt(d), as YaRN makes it"
ROPE = "transformers and vLLM alike keep rotary tables in float32; in bfloat16 far positions collapse"


def _replaced(g: GraphEditor, name: str, at: str, target: str, *operators: str, **options: Any) -> list[Site]:
    node = g.find(name, at, **options)
    sites = g.sites(node, *operators)
    # A target with a dot is an operator of torch. Other targets are kernels of ours.
    g.instead(node, target if "." in target else g.kernel(target), *node.args)
    return sites


def _cast_through(g: GraphEditor, name: str, at: str, dtype: str, back: str = "float32", **options: Any) -> list[Site]:
    node = g.find(name, at, **options)
    narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype(dtype))
    g.after(narrow, "aten._to_copy.default", dtype=g.dtype(back))
    return [g.site(node, "_to_copy")]


@row("ours")
def other_epsilon(g: GraphEditor) -> list[Site]:
    """a norm adds ten times its epsilon."""
    # A norm adds a number only once: its epsilon.
    node = g.find("add", NORM, where=lambda node: isinstance(node.args[1], float))
    node.args = (node.args[0], 10 * node.args[1])
    return g.sites(node)


@row("ours: a cast moved over a reduction")
def mean_square_in_bfloat16(g: GraphEditor) -> list[Site]:
    """a norm's mean of squares is computed in bfloat16."""
    node = g.find("mean", NORM)
    # The kernel squares the input itself, so it gets the input of the square.
    square = node.args[0]
    sites = g.sites(node, "_to_copy", "square", "pow")
    g.instead(node, g.kernel("square_mean_in_bfloat16"), square.args[0])
    return sites


@row("ours: a decomposition; bit-equal where the machine's square root is correctly rounded", sees=(FLOAT32,))
def reciprocal_root_in_two_steps(g: GraphEditor) -> list[Site]:
    """rsqrt(x) is computed as 1 / sqrt(x)."""
    node = g.find("rsqrt", NORM)
    sites = g.sites(node, "sqrt", "reciprocal")
    root = g.make_before(node, "aten.sqrt.default", node.args[0])
    g.instead(node, "aten.reciprocal.default", root)
    return sites


@row("ours: a fusion that reassociates", sees=(FLOAT32,))
def norm_weight_multiplied_first(g: GraphEditor) -> list[Site]:
    """a norm computes x * (r * w) instead of (x * r) * w."""
    inner = g.find("mul", NORM, where=lambda node: "rsqrt" in str(node.args[1]))
    # inner is x * r, outer is (x * r) * w.
    outer = next(user for user in inner.users if "mul" in user.name)
    weight = outer.args[1]
    sites = g.sites(outer)
    scale = g.make_before(outer, "aten.mul.Tensor", inner.args[1], weight)
    g.instead(outer, "aten.mul.Tensor", inner.args[0], scale)
    return sites


@row("ours: a decomposition without the cast to float32", needs=(BFLOAT16,))
def silu_in_two_roundings(g: GraphEditor) -> list[Site]:
    """silu is computed as x * sigmoid(x), rounded twice."""
    return _replaced(g, "silu", ".*", "silu_in_two_roundings", "sigmoid", "mul")


@row("ours: a lookup by name")
def relu_for_silu(g: GraphEditor) -> list[Site]:
    """silu is replaced by relu."""
    return _replaced(g, "silu", ".*", "aten.relu.default", "relu")


@row("ours: a lookup by name")
def gelu_for_silu(g: GraphEditor) -> list[Site]:
    """silu is replaced by gelu."""
    return _replaced(g, "silu", ".*", "aten.gelu.default", "gelu")


@row("ours: contraction to a fused multiply-add; in bfloat16 it hides for 20 steps", sees=(FLOAT32,))
def rotation_contracted(g: GraphEditor) -> list[Site]:
    """a rotation's difference of two products is contracted to an FMA: one rounding is missing."""
    node = g.find("sub", r".*rope")
    # The two products of the difference.
    one, two = node.args
    sites = g.sites(node, "_to_copy", "mul", "add")
    g.instead(node, g.kernel("fused_multiply_add"), *one.args, *two.args, -1)
    return sites


@row("ours: two conventions of rotary embeddings")
def rotated_backwards(g: GraphEditor) -> list[Site]:
    """half of a rotation has the wrong sign."""
    node = g.find("sub", r".*rope")
    sites = g.sites(node, "add")
    g.instead(node, "aten.add.Tensor", *node.args)
    return sites


@row(ROPE)
def rotary_table_in_bfloat16(g: GraphEditor) -> list[Site]:
    """cosines are rounded to bfloat16."""
    return _cast_through(g, "index", r".*rope", "bfloat16")


@row("ours: a decomposition", needs=(EXPERTS,), sees=(FLOAT32,))
def sigmoid_by_exp(g: GraphEditor) -> list[Site]:
    """router scores are computed as 1 / (1 + exp(-x))."""
    return _replaced(g, "sigmoid", r".*router", "sigmoid_by_exp", "neg", "exp", "add", "reciprocal", "div", "mul")


@row("ours: a default of the operator", needs=(SDPA,))
def other_softmax_scale(g: GraphEditor) -> list[Site]:
    """attention scales by 1 / sqrt(d) alone, without YaRN's factor."""

    def plain(node: Any) -> float:
        # The default scale of the operator.
        return float(g.value(node.args[0]).shape[-1]) ** -0.5

    found = g.all(ATTEND)
    node = g.require([node for node in found if node.kwargs.get("scale", plain(node)) != plain(node)], SCALED)
    node.kwargs = dict(node.kwargs) | {"scale": plain(node)}
    return g.sites(node)


@row("ours: a default of the operator", needs=(SDPA,))
def attention_not_causal(g: GraphEditor) -> list[Site]:
    """a token attends to later positions, too."""
    node = g.find(ATTEND)
    # The argument `is_causal`.
    node.args = (*node.args[:4], False, *node.args[5:])
    return g.sites(node)


@row("ours: a missing cast of the logits")
def log_softmax_in_bfloat16(g: GraphEditor) -> list[Site]:
    """the loss is computed from log-probabilities in bfloat16."""
    return _cast_through(g, "_log_softmax", ".*", "bfloat16")


@row("ours: an off-by-one between tokens and labels")
def labels_shifted(g: GraphEditor) -> list[Site]:
    """each token predicts the label of its neighbour."""
    node = g.find("nll_loss_forward")
    g.before(node, node.args[1], "aten.roll.default", [1])
    return [g.site(node, "roll")]


@row("transformers #34191: sums and means in gradient accumulation")
def loss_summed(g: GraphEditor) -> list[Site]:
    """the loss is a sum over tokens instead of a mean."""
    node = g.find("nll_loss_forward")
    # The argument `reduction`: 2 is the sum.
    node.args = (*node.args[:3], 2, *node.args[4:])
    return g.sites(node)


@row("split-K kernels; Thinking Machines, on batch invariance: the reduction's order follows the shape")
def product_in_two_halves(g: GraphEditor) -> list[Site]:
    """a product is computed as the sum of two products over halves of the inner dim."""
    return _replaced(g, "mm", r".*(attention|feed_forward|experts).*", "mm_in_halves", "add", "slice", "t")


@row("the same: a product of one row has another kernel", sees=(FLOAT32,))
def product_row_by_row(g: GraphEditor) -> list[Site]:
    """a product is computed row by row."""
    return _replaced(g, "mm", r".*(attention|feed_forward|experts).*", "mm_rowwise", "cat", "unbind", "unsqueeze")


@row("torch.backends.cuda.matmul.allow_tf32", needs=(FLOAT32,))
def product_in_tf32(g: GraphEditor) -> list[Site]:
    """a product's factors are rounded to TF32, which drops 13 mantissa bits."""
    node = g.find("mm", r".*(attention|feed_forward|experts).*")
    for read in list(node.all_input_nodes):
        g.before(node, read, g.kernel("in_tf32"))
    return g.sites(node, "bitwise_and", "__and__", "add", "clone", "view")


@row("ours: a cast by its bits", needs=(BFLOAT16,))
def cast_truncates(g: GraphEditor) -> list[Site]:
    """a cast to bfloat16 truncates instead of rounding."""
    # For its error: the step must compute in bfloat16.
    node = g.find("_to_copy", NORM, where=lambda node: node.kwargs["dtype"] == g.dtype("bfloat16") and bool(node.args))
    found = [x for x in g.all("_to_copy", NORM) if x.kwargs["dtype"] == g.dtype("bfloat16") and "mul" in x.args[0].name]
    node = g.require(found, "a norm whose result is rounded to bfloat16")
    sites = g.sites(node, "bitwise_and", "__and__")
    g.instead(node, g.kernel("truncated"), node.args[0])
    return sites


@row("ours: another model's convention")
def embedding_scaled(g: GraphEditor) -> list[Site]:
    """embeddings are multiplied by the square root of the model dim."""
    node = g.find("embedding")
    width = g.value(node).shape[-1]
    g.after(node, "aten.mul.Scalar", float(width) ** 0.5)
    return [g.site(node, "mul")]


@row("ours: another order of a reduction", sees=(FLOAT32,), kinds=("grad",))
def weight_gradient_summed_backwards(g: GraphEditor) -> list[Site]:
    """a norm's weight gradient is summed from the last row to the first."""
    # A weight's gradient is a sum over all dims of the input but the last; a norm's other sums are over the last.
    rank = len(g.case.input_shape)
    node = g.find("sum", NORM, direction="backward", where=lambda node: len(node.args[1]) == rank)
    sites = g.sites(node, "flip")
    g.instead(node, g.kernel("summed_backwards"), *node.args)
    return sites


@row("ours: loss scaling's dtype without its scale", kinds=("grad",))
def gradient_through_float16(g: GraphEditor) -> list[Site]:
    """a gradient is cast to float16 and back."""
    node = g.find("mm", direction="backward", where=lambda node: g.value(node) is not None)
    dtype = str(g.value(node).dtype).removeprefix("torch.")
    narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype("float16"))
    g.after(narrow, "aten._to_copy.default", dtype=g.dtype(dtype))
    return [g.site(node, "_to_copy")]


@row("ours: subnormals of a narrower dtype", kinds=("grad",))
def small_gradients_flushed(g: GraphEditor) -> list[Site]:
    """elements of a gradient below 2^-14 become zero."""
    node = g.find("reduce_scatter_tensor", direction="backward")
    g.before(node, node.args[0], g.kernel("flushed"))
    return [g.site(node, name) for name in ("where", "lt", "abs", "zeros_like")]

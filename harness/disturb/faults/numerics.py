"""What computes nearly the same: another formula, dtype, order or rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bitproof.harness.disturb.faults.entry import BFLOAT16, EXPERTS, FLOAT32, SDPA, Entry, Family, Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from bitproof.harness.disturb.faults.surgeon import Surgeon

FAMILY: Family = "numerics"

ATTEND = "_scaled_dot_product_flash_attention_for_cpu"
NORM = r".*norm"
SCALED = "attention whose scale is another than 1 / sqrt(d), as YaRN makes it"


def _replaced(name: str, at: str, target: str, *operators: str, **options: Any) -> Callable[[Surgeon], list[Site]]:
    """A call of an operator becomes one of another operator, or of a kernel, with the same arguments."""

    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, at, **options)
        sites = g.sites(node, *operators)
        g.instead(node, target if "." in target else g.kernel(target), *node.args)
        return sites

    return edit


def _followed(name: str, at: str, target: str, *operators: str, **options: Any) -> Callable[[Surgeon], list[Site]]:
    """What a call gives is changed by a kernel."""

    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, at, **options)
        g.after(node, target if "." in target else g.kernel(target))
        return [g.site(node, name) for name in operators]

    return edit


def _through(name: str, at: str, dtype: str, back: str = "float32", **options: Any) -> Callable[[Surgeon], list[Site]]:
    """What a call gives is rounded to another dtype and back."""

    def edit(g: Surgeon) -> list[Site]:
        node = g.find(name, at, **options)
        narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype(dtype))
        g.after(narrow, "aten._to_copy.default", dtype=g.dtype(back))
        return [g.site(node, "_to_copy")]

    return edit


def _other_epsilon(g: Surgeon) -> list[Site]:
    node = g.find("add", NORM, where=lambda node: isinstance(node.args[1], float))
    node.args = (node.args[0], 10 * node.args[1])
    return g.sites(node)


def _mean_in_bfloat16(g: Surgeon) -> list[Site]:
    node = g.find("mean", NORM)
    square = node.args[0]
    sites = g.sites(node, "_to_copy", "square", "pow")
    g.instead(node, g.kernel("square_mean_in_bfloat16"), square.args[0])
    return sites


def _root_in_two_steps(g: Surgeon) -> list[Site]:
    node = g.find("rsqrt", NORM)
    sites = g.sites(node, "sqrt", "reciprocal")
    root = g.make_before(node, "aten.sqrt.default", node.args[0])
    g.instead(node, "aten.reciprocal.default", root)
    return sites


def _weight_first(g: Surgeon) -> list[Site]:
    inner = g.find("mul", NORM, where=lambda node: "rsqrt" in str(node.args[1]))
    outer = next(user for user in inner.users if "mul" in user.name)
    weight = outer.args[1]
    sites = g.sites(outer)
    scale = g.make_before(outer, "aten.mul.Tensor", inner.args[1], weight)
    g.instead(outer, "aten.mul.Tensor", inner.args[0], scale)
    return sites


def _contracted(g: Surgeon) -> list[Site]:
    node = g.find("sub", r".*rope")
    one, two = node.args
    sites = g.sites(node, "_to_copy", "mul", "add")
    g.instead(node, g.kernel("fused_multiply_add"), *one.args, *two.args, -1)
    return sites


def _turned_back(g: Surgeon) -> list[Site]:
    node = g.find("sub", r".*rope")
    sites = g.sites(node, "add")
    g.instead(node, "aten.add.Tensor", *node.args)
    return sites


def _other_scale(g: Surgeon) -> list[Site]:
    def plain(node: Any) -> float:
        return float(g.value(node.args[0]).shape[-1]) ** -0.5

    found = g.all(ATTEND)
    node = g.require([node for node in found if node.kwargs.get("scale", plain(node)) != plain(node)], SCALED)
    node.kwargs = dict(node.kwargs) | {"scale": plain(node)}
    return g.sites(node)


def _not_causal(g: Surgeon) -> list[Site]:
    node = g.find(ATTEND)
    node.args = (*node.args[:4], False, *node.args[5:])
    return g.sites(node)


def _labels_shifted(g: Surgeon) -> list[Site]:
    node = g.find("nll_loss_forward")
    g.before(node, node.args[1], "aten.roll.default", [1])
    return [g.site(node, "roll")]


def _loss_summed(g: Surgeon) -> list[Site]:
    node = g.find("nll_loss_forward")
    node.args = (*node.args[:3], 2, *node.args[4:])
    return g.sites(node)


def _tensor_cores(g: Surgeon) -> list[Site]:
    node = g.find("mm", r".*(attention|feed_forward|experts).*")
    for read in list(node.all_input_nodes):
        g.before(node, read, g.kernel("in_tf32"))
    return g.sites(node, "bitwise_and", "__and__", "add", "clone", "view")


def _embedding_scaled(g: Surgeon) -> list[Site]:
    node = g.find("embedding")
    width = g.value(node).shape[-1]
    g.after(node, "aten.mul.Scalar", float(width) ** 0.5)
    return [g.site(node, "mul")]


def _truncated(g: Surgeon) -> list[Site]:
    node = g.find("_to_copy", NORM, where=lambda node: node.kwargs["dtype"] == g.dtype("bfloat16") and bool(node.args))
    found = [x for x in g.all("_to_copy", NORM) if x.kwargs["dtype"] == g.dtype("bfloat16") and "mul" in x.args[0].name]
    node = g.require(found, "a norm whose result is rounded to bfloat16")
    sites = g.sites(node, "bitwise_and", "__and__")
    g.instead(node, g.kernel("truncated"), node.args[0])
    return sites


def _summed_backwards(g: Surgeon) -> list[Site]:
    node = g.find("sum", NORM, direction="backward", where=lambda node: len(node.args[1]) == 2)
    sites = g.sites(node, "flip")
    g.instead(node, g.kernel("summed_backwards"), *node.args)
    return sites


def _gradient_in_half(g: Surgeon) -> list[Site]:
    node = g.find("mm", direction="backward", where=lambda node: g.value(node) is not None)
    dtype = str(g.value(node).dtype).removeprefix("torch.")
    narrow = g.after(node, "aten._to_copy.default", dtype=g.dtype("float16"))
    g.after(narrow, "aten._to_copy.default", dtype=g.dtype(dtype))
    return [g.site(node, "_to_copy")]


def _flushed(g: Surgeon) -> list[Site]:
    node = g.find("reduce_scatter_tensor", direction="backward")
    g.before(node, node.args[0], g.kernel("flushed"))
    return [g.site(node, name) for name in ("where", "lt", "abs", "zeros_like")]


ROPE = "transformers and vLLM alike keep rotary tables in float32; in bfloat16 far positions collapse"

ENTRIES = (
    Entry(name="other-epsilon", says="a norm adds ten times its epsilon", source="ours", edit=_other_epsilon),
    Entry(
        name="mean-square-in-bfloat16",
        says="a norm's mean of squares is taken in bfloat16",
        source="ours: a cast moved over a reduction",
        edit=_mean_in_bfloat16,
    ),
    Entry(
        name="reciprocal-root-in-two-steps",
        says="1 / sqrt(x) stands for rsqrt(x)",
        source="ours: a decomposition; bit-equal where the machine's square root is correctly rounded",
        edit=_root_in_two_steps,
        sees=(FLOAT32,),
    ),
    Entry(
        name="norm-weight-multiplied-first",
        says="x (r w) stands for (x r) w in a norm",
        source="ours: a fusion that reassociates",
        edit=_weight_first,
        sees=(FLOAT32,),
    ),
    Entry(
        name="silu-in-two-roundings",
        says="silu is x times sigmoid(x), rounded twice",
        source="ours: a decomposition without the cast to float32",
        edit=_replaced("silu", ".*", "silu_in_two_roundings", "sigmoid", "mul"),
        needs=(BFLOAT16,),
    ),
    Entry(
        name="relu-for-silu",
        says="another activation",
        source="ours: a lookup by name",
        edit=_replaced("silu", ".*", "aten.relu.default", "relu"),
    ),
    Entry(
        name="gelu-for-silu",
        says="another smooth activation",
        source="ours: a lookup by name",
        edit=_replaced("silu", ".*", "aten.gelu.default", "gelu"),
    ),
    Entry(
        name="rotation-contracted",
        says="two products and their difference in a rotation are rounded once too seldom",
        source="ours: contraction to a fused multiply-add; in bfloat16 it hides for 20 steps",
        edit=_contracted,
        sees=(FLOAT32,),
    ),
    Entry(
        name="rotated-backwards",
        says="half of a rotation has the wrong sign",
        source="ours: two conventions of rotary embeddings",
        edit=_turned_back,
    ),
    Entry(
        name="rotary-table-in-bfloat16",
        says="cosines are rounded to bfloat16",
        source=ROPE,
        edit=_through("index", r".*rope", "bfloat16"),
    ),
    Entry(
        name="sigmoid-by-exp",
        says="router scores are 1 / (1 + exp(-x))",
        source="ours: a decomposition",
        edit=_replaced("sigmoid", r".*router", "sigmoid_by_exp", "neg", "exp", "add", "reciprocal", "div", "mul"),
        needs=(EXPERTS,),
        sees=(FLOAT32,),
    ),
    Entry(
        name="other-softmax-scale",
        says="attention scales by 1 / sqrt(d) alone, without YaRN's factor",
        source="ours: a default of the operator",
        edit=_other_scale,
        needs=(SDPA,),
    ),
    Entry(
        name="attention-not-causal",
        says="attention sees later positions",
        source="ours: a default of the operator",
        edit=_not_causal,
        needs=(SDPA,),
    ),
    Entry(
        name="log-softmax-in-bfloat16",
        says="the loss is taken of log-probabilities in bfloat16",
        source="ours: a missing cast of the logits",
        edit=_through("_log_softmax", ".*", "bfloat16"),
    ),
    Entry(
        name="labels-shifted",
        says="each token is to predict another label",
        source="ours: an off-by-one between tokens and labels",
        edit=_labels_shifted,
    ),
    Entry(
        name="loss-summed",
        says="the loss is a sum over tokens",
        source="transformers #34191: sums and means in gradient accumulation",
        edit=_loss_summed,
    ),
    Entry(
        name="product-in-two-halves",
        says="a product is the sum of two over halves of the inner dim",
        source="split-K kernels; Thinking Machines, on batch invariance: the reduction's order follows the shape",
        edit=_replaced("mm", r".*(attention|feed_forward|experts).*", "mm_in_halves", "add", "slice", "t"),
    ),
    Entry(
        name="product-row-by-row",
        says="a product is taken row by row",
        source="the same: a product of one row has another kernel",
        edit=_replaced("mm", r".*(attention|feed_forward|experts).*", "mm_rowwise", "cat", "unbind", "unsqueeze"),
        sees=(FLOAT32,),
    ),
    Entry(
        name="product-in-tf32",
        says="a product's factors lose 13 bits",
        source="torch.backends.cuda.matmul.allow_tf32",
        edit=_tensor_cores,
        needs=(FLOAT32,),
    ),
    Entry(
        name="cast-truncates",
        says="a cast to bfloat16 cuts where it should round",
        source="ours: a cast by its bits",
        edit=_truncated,
        needs=(BFLOAT16,),
    ),
    Entry(
        name="embedding-scaled",
        says="embeddings are multiplied by the root of the model dim",
        source="ours: another model's convention",
        edit=_embedding_scaled,
    ),
    Entry(
        name="weight-gradient-summed-backwards",
        says="a norm's weight gradient is summed from the last row to the first",
        source="ours: another order of a reduction",
        edit=_summed_backwards,
        sees=(FLOAT32,),
        kinds=("grad",),
    ),
    Entry(
        name="gradient-through-float16",
        says="a gradient goes through float16",
        source="ours: loss scaling's dtype without its scale",
        edit=_gradient_in_half,
        kinds=("grad",),
    ),
    Entry(
        name="small-gradients-flushed",
        says="elements of a gradient below 2^-14 are zeros",
        source="ours: subnormals of a narrower dtype",
        edit=_flushed,
        kinds=("grad",),
    ),
)

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from bitproof.harness.case import Chunking
from bitproof.harness.errors import ChunkError
from bitproof.reference.chunking import check_chunking, chunk_modules
from bitproof.reference.layers.document_mask import document_mask


class Block(nn.Module):
    """Notes what it was called with; returns `answer(x)`."""

    def __init__(self, answer=lambda x: x * 2):
        super().__init__()
        self.calls = []
        self.answer = answer

    def forward(self, x_BSD, positions_BS=None, attention_masks=None):
        self.calls.append((x_BSD, positions_BS, attention_masks))
        return self.answer(x_BSD)


class TokenWise(Block):
    def forward(self, x_BSD):
        return super().forward(x_BSD)


def model_of(block):
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    return model


def chunked(block, dim="batch", folded=False):
    assert chunk_modules(model_of(block), Chunking(dim=dim, modules="layers.*"), folded=folded).names == ["layers.0"]
    return block


def refusal(call):
    with pytest.raises(ChunkError) as caught:
        call()
    return str(caught.value)


def test_a_batch_is_split_in_two_and_the_outputs_are_concatenated():
    block, x = chunked(Block()), torch.randn(4, 6, 3)
    assert torch.equal(block(x), x * 2)
    assert [tuple(seen.shape) for seen, _, _ in block.calls] == [(2, 6, 3), (2, 6, 3)]
    assert torch.equal(block.calls[1][0], x[2:])


def test_a_sequence_is_split_in_contiguous_halves():
    block, x = chunked(TokenWise(), "seq"), torch.randn(4, 6, 3)
    assert torch.equal(block(x), x * 2)
    assert torch.equal(block.calls[1][0], x[:, 3:])
    assert all(seen.is_contiguous() for seen, _, _ in block.calls)


def test_positions_are_split_with_the_activation():
    block = chunked(Block())
    positions = torch.arange(24).view(4, 6)
    block(torch.randn(4, 6, 3), positions_BS=positions)
    assert torch.equal(block.calls[1][1], positions[2:])


def test_tuples_and_lists_of_outputs_are_concatenated_item_by_item():
    block, x = chunked(Block(lambda x: (x, [x + 1, None]))), torch.randn(4, 6, 3)
    first, (second, third) = block(x)
    assert torch.equal(first, x) and torch.equal(second, x + 1) and third is None


def test_gradients_of_the_halves_meet_in_the_whole():
    block, x = chunked(Block(lambda x: x**2)), torch.randn(4, 6, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(gradient, 2 * x)


def captured_mask(batch):
    """Documents of 20 tokens across rows, known to the mask as a captured tensor."""
    return document_mask(torch.arange(batch * 32).view(batch, 32) % 20 == 0, 16)


def closure_mask(batch):
    """The same, known to torch's own mask by a closure."""
    documents = torch.arange(batch * 32).view(batch, 32) // 20

    def same_document(b, h, q, kv):
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return create_block_mask(same_document, batch, None, 32, 32, device="cpu", BLOCK_SIZE=16)


@pytest.mark.parametrize("make_mask", [captured_mask, closure_mask])
def test_a_block_mask_is_split_along_batch_and_keeps_its_own_documents(make_mask):
    block, mask = chunked(Block()), make_mask(4)
    block(torch.randn(4, 32, 3), attention_masks={"causal": mask, "none": None})
    for index in (0, 1):
        half = block.calls[index][2]["causal"]
        assert isinstance(half, BlockMask) and half.shape[0] == 2
        assert torch.equal(half.to_dense(), mask.to_dense()[2 * index : 2 * index + 2])
        seen = create_mask(half.mask_mod, 2, 1, 32, 32, device="cpu")
        assert torch.equal(seen, create_mask(mask.mask_mod, 4, 1, 32, 32, device="cpu")[2 * index : 2 * index + 2])
        assert block.calls[index][2]["none"] is None


def test_a_block_mask_of_one_row_for_all_is_given_to_both_chunks_whole():
    block = chunked(Block())
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    block(torch.randn(4, 32, 3), attention_masks=mask)
    assert all(torch.equal(seen.to_dense(), mask.to_dense()) for _, _, seen in block.calls)


def test_an_even_batch_is_split_and_an_odd_one_is_refused():
    chunked(Block())(torch.randn(2, 6, 3))
    assert refusal(lambda: chunked(Block())(torch.randn(3, 6, 3))) == (
        "ChunkError: cannot split `x_BSD` of layers.0 in two along dim 0\n"
        "  expected: an even extent\n"
        "  found: 3, in torch.float32 tensor of shape (3, 6, 3)\n"
        "  fix: choose an even number of sequences (batch) or sequence length (seq) in the case"
    )


def test_an_activation_of_another_rank_is_refused():
    assert refusal(lambda: chunked(Block())(torch.randn(4, 6))) == (
        "ChunkError: cannot split `x_BSD` of layers.0\n"
        "  expected: a floating-point tensor of rank 3 (batch, sequence, model dim)\n"
        "  found: torch.float32 tensor of shape (4, 6)"
    )


def test_an_argument_that_nobody_can_split_is_refused():
    class WithCache(Block):
        def forward(self, x_BSD, cache=None):
            return super().forward(x_BSD)

    chunked(WithCache())(torch.randn(4, 6, 3), cache=None)
    assert refusal(lambda: chunked(WithCache())(torch.randn(4, 6, 3), cache=torch.zeros(4))) == (
        "ChunkError: cannot split argument `cache` of layers.0\n"
        "  expected: the activation, positions of extent 4 along dim 0, or attention masks\n"
        "  found: torch.float32 tensor of shape (4,)"
    )


def test_positions_of_another_extent_are_refused():
    assert "cannot split argument `positions_BS` of layers.0" in refusal(
        lambda: chunked(Block())(torch.randn(4, 6, 3), positions_BS=torch.zeros(1, 6))
    )


def test_a_mask_that_is_no_block_mask_is_refused():
    assert refusal(lambda: chunked(Block())(torch.randn(4, 6, 3), attention_masks=torch.ones(6, 6))) == (
        "ChunkError: cannot split attention mask `attention_masks` of layers.0\n"
        "  expected: None, a BlockMask of batch 1 or 4, or a dict of them\n"
        "  found: torch.float32 tensor of shape (6, 6)"
    )


def test_outputs_without_the_chunked_extent_are_refused():
    assert refusal(lambda: chunked(Block(lambda x: x.sum()))(torch.randn(4, 6, 3))) == (
        "ChunkError: cannot concatenate the chunks' outputs of layers.0\n"
        "  expected: tensors of extent 2 along dim 0, or tuples and lists of them\n"
        "  found: torch.float32 tensor of shape () and torch.float32 tensor of shape ()"
    )


def test_a_sequence_is_not_split_through_a_module_that_takes_positions():
    chunked(TokenWise(), "seq")
    assert refusal(lambda: chunked(Block(), "seq")) == (
        "ChunkError: cannot chunk layers.0 along the sequence: it takes positions_BS, attention_masks, "
        "so it mixes positions\n"
        "  expected: a module that treats each token alone, such as layers.*.moe\n"
        "  found: forward(x_BSD, positions_BS=None, attention_masks=None)\n"
        "  fix: chunk along batch, or choose modules='layers.*.moe'"
    )


def test_a_pattern_that_matches_nothing_is_refused_with_the_patterns_there_are():
    assert refusal(lambda: chunk_modules(model_of(Block()), Chunking(dim="batch", modules="blocks.*"))) == (
        "ChunkError: the chunking pattern 'blocks.*' matches no module\n"
        "  expected: one of the model's module patterns: layers, layers.*\n"
        "  found: no match\n"
        "  fix: correct `modules` in the case's Chunking"
    )


def test_a_gradient_of_minus_zero_keeps_its_sign():
    block, x = chunked(Block(lambda x: x * -1.0)), torch.ones(2, 1, 1, requires_grad=True)
    (gradient,) = torch.autograd.grad(block(x), x, torch.zeros(2, 1, 1))
    assert torch.signbit(gradient).all()


def test_of_the_matching_modules_only_the_named_ones_run_in_chunks():
    model, x = nn.Module(), torch.randn(4, 6, 3)
    model.layers = nn.ModuleDict({"0": Block(), "1": Block()})
    assert chunk_modules(model, Chunking(dim="batch", modules="layers.*", only=("layers.1",))).names == ["layers.1"]
    for layer in model.layers.values():
        layer(x)
    assert [len(layer.calls) for layer in model.layers.values()] == [1, 2]


class Chain(nn.Module):
    """Calls its layers by the names it is given at each step."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, names):
        for name in names:
            x = self.get_submodule(name)(x)
        return x


def steps(model, *steps, modules="layers.*"):
    """What is told of each step, which calls the named modules."""
    chunks = chunk_modules(model, Chunking(dim="batch", modules=modules))
    lines = []
    for index, names in enumerate(steps):
        model(torch.randn(4, 6, 3), names)
        lines.append(chunks.end_step(index))
    return lines


def test_each_step_shows_how_often_every_module_ran_in_chunks():
    names = ["layers.0", "layers.1", "layers.0"]
    assert steps(Chain(Block(), Block()), names, names) == [{"layers.0": 2, "layers.1": 1}] * 2


def test_a_module_that_matches_but_does_not_run_is_refused_with_the_patterns_of_those_that_do():
    assert refusal(lambda: steps(Chain(Block(), Block()), ["layers.0", "layers.1"], modules="layers")) == (
        "ChunkError: layers matches the chunking pattern 'layers' but did not run in step 0\n"
        "  expected: a pattern of modules that the step calls: layers.*\n"
        "  found: no call of layers\n"
        "  fix: correct `modules` in the case's Chunking"
    )


def test_a_module_of_which_only_a_child_is_called_did_not_run():
    outer = Chain(Block())
    assert refusal(lambda: steps(Chain(outer), ["layers.0.layers.0"])).splitlines()[:2] == [
        "ChunkError: layers.0 matches the chunking pattern 'layers.*' but did not run in step 0",
        "  expected: a pattern of modules that the step calls: layers.*.layers.*",
    ]


def test_a_module_whose_chunked_forward_was_replaced_did_not_run():
    model = Chain(Block())
    chunks = chunk_modules(model, Chunking(dim="batch", modules="layers.*"))
    model.layers[0].forward = lambda x: x
    model(torch.randn(4, 6, 3), ["layers.0"])
    assert "layers.0 matches the chunking pattern 'layers.*' but did not run" in refusal(lambda: chunks.end_step(0))


def test_a_module_that_runs_in_the_first_step_must_run_in_every_other():
    text = refusal(lambda: steps(Chain(Block(), Block()), ["layers.0", "layers.1"], ["layers.1"]))
    assert text.startswith("ChunkError: layers.0 matches the chunking pattern 'layers.*' but did not run in step 1\n")


def test_a_module_must_run_equally_often_in_every_step():
    assert refusal(
        lambda: steps(Chain(Block(), Block()), ["layers.0", "layers.1"], ["layers.0"] * 2 + ["layers.1"])
    ) == (
        "ChunkError: layers.0 did not run as often in step 1 as in the first\n"
        "  expected: calls: layers.0 1\n"
        "  found: calls: layers.0 2\n"
        "  fix: chunk modules that every step calls equally often"
    )


def test_a_module_that_is_chunked_runs_in_no_chunk_of_another():
    inner = Block()
    outer = Block(lambda x: inner(x))
    assert refusal(lambda: steps(Chain(outer, inner), ["layers.0"])) == (
        "ChunkError: cannot chunk layers.1: it runs within another module that is chunked\n"
        "  expected: chosen modules that do not call each other\n"
        "  found: a call of layers.1 in chunk 0\n"
        "  fix: correct `modules` in the case's Chunking, or name the outer modules in `only`"
    )


def test_a_named_module_that_is_not_there_is_refused():
    chunking = Chunking(dim="batch", modules="layers.*", only=("layers.0", "layers.7"))
    assert refusal(lambda: chunk_modules(model_of(Block()), chunking)) == (
        "ChunkError: layers.7 cannot be chunked, as the model has no such module\n"
        "  expected: modules of the model that layers.* matches\n"
        "  found: only=('layers.0', 'layers.7')\n"
        "  fix: correct `only` in the case's Chunking"
    )


class Normed(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x_BSD):
        return self.norm(x_BSD.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("dim", ["batch", "seq"])
@pytest.mark.parametrize(
    ("norm", "state"),
    [
        (nn.BatchNorm1d(4), "in training"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "without running statistics"),
        (nn.LazyBatchNorm1d(), "in training"),
        (nn.SyncBatchNorm(4), "in training"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "in training"),
    ],
)
def test_a_norm_whose_statistics_would_be_of_one_chunk_is_refused_by_name_before_any_step(norm, state, dim):
    chunking = Chunking(dim=dim, modules="layers.*")
    assert refusal(lambda: check_chunking(model_of(Normed(norm)), chunking)) == (
        f"ChunkError: cannot chunk layers.0: layers.0.norm is a {type(norm).__name__}, whose statistics would be "
        "of one chunk\n"
        "  expected: norms without statistics over rows: nn.RMSNorm, nn.LayerNorm, along batch also nn.GroupNorm\n"
        f"  found: layers.0.norm, {state}\n"
        "  fix: choose modules without layers.*.norm, or another norm"
    )


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4).eval(),
        nn.InstanceNorm1d(4),
        nn.InstanceNorm1d(4, track_running_stats=True).eval(),
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
    ],
)
def test_a_norm_that_computes_no_statistics_over_rows_is_not_refused_before_any_step(norm):
    check_chunking(model_of(Normed(norm)), Chunking(dim="batch", modules="layers.*"))


def test_a_batch_norm_in_another_module_is_not_refused():
    model = model_of(TokenWise())
    model.norm = nn.BatchNorm1d(4)
    check_chunking(model, Chunking(dim="batch", modules="layers.*"))


def test_folded_tokens_are_split_in_two_with_their_positions_and_their_documents_offsets():
    block, x = chunked(Block(), folded=True), torch.randn(8, 3)
    positions, offsets = torch.tensor([0, 1, 0, 1, 0, 1, 2, 3]), torch.tensor([0, 0, 2, 2, 4, 4, 4, 4])
    assert torch.equal(block(x, positions_BS=positions, attention_masks={"causal": offsets, "none": None}), x * 2)
    for index, half in enumerate((slice(0, 4), slice(4, 8))):
        seen, own, masks = block.calls[index]
        assert torch.equal(seen, x[half]) and torch.equal(own, positions[half])
        assert torch.equal(masks["causal"], offsets[half]) and masks["none"] is None


def test_both_dims_cut_folded_tokens_alike_in_a_module_that_treats_each_token_alone():
    x = torch.randn(6, 3)
    for dim in ("batch", "seq"):
        block = chunked(TokenWise(), dim, folded=True)
        assert torch.equal(block(x), x * 2) and torch.equal(block.calls[1][0], x[3:])


def test_a_folded_activation_has_rank_2_and_any_other_is_refused():
    chunked(Block(), folded=True)(torch.randn(4, 3))
    assert refusal(lambda: chunked(Block(), folded=True)(torch.randn(2, 2, 3))) == (
        "ChunkError: cannot split `x_BSD` of layers.0\n"
        "  expected: a floating-point tensor of rank 2 (tokens, model dim)\n"
        "  found: torch.float32 tensor of shape (2, 2, 3)"
    )


def test_an_odd_number_of_folded_tokens_is_refused():
    chunked(Block(), folded=True)(torch.randn(6, 3))
    assert refusal(lambda: chunked(Block(), folded=True)(torch.randn(7, 3))) == (
        "ChunkError: cannot split `x_BSD` of layers.0 in two along dim 0\n"
        "  expected: an even extent\n"
        "  found: 7, in torch.float32 tensor of shape (7, 3)\n"
        "  fix: choose an even number of tokens in the case"
    )


def test_a_cut_between_two_documents_is_accepted_and_one_inside_a_document_is_refused():
    x = torch.randn(6, 3)
    chunked(Block(), folded=True)(x, attention_masks=torch.tensor([0, 0, 0, 3, 3, 3]))
    assert refusal(lambda: chunked(Block(), folded=True)(x, attention_masks=torch.tensor([0, 0, 2, 2, 4, 4]))) == (
        "ChunkError: cannot cut layers.0 into chunks inside a document, whose tokens attend to each other\n"
        "  expected: a document that begins with token 3, the first of chunk 1\n"
        "  found: tokens 2 and 3 in the document with offset 2\n"
        "  fix: end documents with their sequences, or choose modules that treat each token alone"
    )


@pytest.mark.parametrize("mask", [torch.zeros(4, dtype=torch.int64), torch.zeros(6), "causal"])
def test_folded_tokens_take_no_mask_but_the_offsets_of_all_their_documents(mask):
    text = refusal(lambda: chunked(Block(), folded=True)(torch.randn(6, 3), attention_masks=mask))
    assert "expected: None, the offset of each token's document as integers of shape (6,), or a dict of them" in text


def test_folded_attention_along_seq_is_refused():
    assert "cannot chunk layers.0 along the sequence: it takes positions_BS, attention_masks, so it mixes" in refusal(
        lambda: chunked(Block(), "seq", folded=True)
    )

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.passes.attention import attention_layers, fuse_attention
from export.passes.fp16 import last_of, to_half
from export.passes.graph import MICROSOFT, GraphView, attribute, probe, random_feed, session
from export.passes.int8 import (
    LARGEST_PAIR,
    Range,
    activation_scale,
    find_products,
    measure_ranges,
    quantize,
    quantize_tables,
    quantize_weight,
    smooth,
    token_states,
)
from export.passes.simplify import keep_residuals_apart, simplified
from scheduler_core.errors import TailcastError
from tests.export.passes.conftest import LONGEST, VOCABULARY, largest_difference


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def fused(path) -> onnx.ModelProto:
    model = simplified(path)
    assert fuse_attention(model, max_length=LONGEST, vocabulary=VOCABULARY) == 2
    return model


@pytest.mark.parametrize("kind", ["bert", "deberta", "opt"])
def test_fused_attention_gives_the_same_numbers(graphs, kind):
    model = fused(graphs[kind])
    assert attention_layers(model) == 2
    found = operators(model)
    assert not found["Softmax"]
    if kind == "deberta":  # its gathering and its repeated tables are gone
        assert not found["GatherElements"]
        assert not found["Tile"]
    assert largest_difference(onnx.load(graphs[kind]), model) < 2e-5


def test_a_decoder_is_fused_as_one(graphs):
    model = fused(graphs["opt"])
    layers = [node for node in model.graph.node if node.op_type == "MultiHeadAttention"]
    assert [attribute(node, "unidirectional", 0) for node in layers] == [1, 1]
    bert = [node for node in fused(graphs["bert"]).graph.node if node.op_type == "MultiHeadAttention"]
    assert [attribute(node, "unidirectional", 0) for node in bert] == [0, 0]


def test_attention_that_reads_wrongly_is_left_alone(graphs):
    # Scores are squashed on their way to the softmax: it still looks like attention but is none.
    model = simplified(graphs["bert"])
    graph = GraphView(model)
    softmax = next(node for node in graph.nodes if node.op_type == "Softmax")
    squashed = graph.add("Mul", [softmax.input[0], graph.add_constant("half", np.float32(0.5))])
    graph.replace_uses(softmax.input[0], squashed, among=[softmax])
    changed = onnx.ModelProto.FromString(graph.finish().SerializeToString())
    # The factor is on the mask too, which the reading has no place for; the other layer is fused.
    assert fuse_attention(model, max_length=LONGEST, vocabulary=VOCABULARY) == 1
    assert largest_difference(changed, model) < 2e-5


def test_relative_positions_beyond_the_table_are_never_read(graphs):
    model = fused(graphs["deberta"])
    tables = [tensor for tensor in model.graph.initializer if "positions_by_distance" in tensor.name]
    assert len(tables) == 4  # two terms in each of two layers
    assert all(tensor.dims[-1] == 2 * LONGEST for tensor in tables)


def test_residuals_stay_apart_and_numbers_the_same(graphs):
    model = simplified(graphs["bert"])
    assert keep_residuals_apart(model) == 5  # the embeddings and twice in each of two layers
    assert operators(model)["Sum"] == 5
    assert largest_difference(onnx.load(graphs["bert"]), model) < 2e-6


def quantisable(model):
    feed = random_feed(model, 2, 5, np.random.default_rng(0), VOCABULARY)
    rows = token_states(model, feed)
    return find_products(GraphView(model), rows), rows


def feeds(model, count=16):
    rng = np.random.default_rng(3)
    return [random_feed(model, 1, int(rng.integers(2, LONGEST)), rng, VOCABULARY) for _ in range(count)]


def measured(model):
    products, rows = quantisable(model)
    ranges = measure_ranges(model, [product.source for product in products], feeds(model))
    graph = GraphView(model)
    return graph, find_products(graph, rows), ranges


def test_only_products_of_states_are_quantized(graphs):
    model = fused(graphs["bert"])
    products, _ = quantisable(model)
    # Query, key and value share a source; then the output and the two of the feed-forward part.
    assert len(products) == 12
    assert len({product.source for product in products}) == 8
    assert all(product.bias for product in products)


def stand_out(model, factor):
    """Makes one channel of every normalised state that much wider than the others, as in trained encoders."""
    graph = GraphView(model)
    for node in graph.nodes:
        if node.op_type == "LayerNormalization":
            gain = graph.constant(node.input[1]).copy()
            gain[7] *= factor
            graph.replace_uses(node.input[1], graph.add_constant("gain", gain), among=[node])
    return graph.finish()


def unevenness(graph, ranges):
    """Of normalised states: how much wider the widest channel is than the usual one, at most."""
    normalised = (name for name in ranges if graph.producer(name).op_type == "LayerNormalization")
    widths = [ranges[name].high - ranges[name].low for name in normalised]
    return max(width.max() / np.median(width) for width in widths)


def test_smoothing_changes_no_answer(graphs):
    model = stand_out(fused(graphs["bert"]), 30)
    plain = onnx.ModelProto.FromString(model.SerializeToString())
    graph, products, ranges = measured(model)
    before = unevenness(graph, ranges)
    # Normalised states and attention's context; what follows a GELU is not linear.
    assert smooth(graph, products, ranges) == 6
    assert largest_difference(plain, model) < 2e-5
    after_graph, _, after = measured(model)
    assert unevenness(after_graph, after) < 0.5 * before


def test_int8_is_near_and_independent_of_batch_mates(graphs):
    plain = session(onnx.load(graphs["bert"]))
    model = fused(graphs["bert"])
    graph, products, ranges = measured(model)
    assert quantize(graph, products, ranges) == 12
    assert quantize_tables(GraphView(model), least_rows=50) == 2
    assert operators(model)["MatMulIntegerToFloat"] == 12
    assert {entry.domain for entry in model.opset_import} >= {"", MICROSOFT}
    small = session(model)
    rng = np.random.default_rng(5)
    together = random_feed(model, 6, 30, rng, VOCABULARY)
    lengths = together["attention_mask"].sum(axis=1)
    batch = small.run(["mu"], together)[0]
    alone = np.concatenate(
        [
            small.run(["mu"], {name: values[row : row + 1, :length] for name, values in together.items()})[0]
            for row, length in enumerate(lengths)
        ]
    )
    wanted = plain.run(["mu"], together)[0]
    # Weights eight times the usual make this network amplify every rounding; a trained one loses a tenth of this.
    assert np.sqrt(((batch - wanted) ** 2).mean()) < 0.3 * wanted.std()
    assert np.abs(batch - alone).max() < 0.01 * wanted.std()


def test_weights_cannot_overflow_sixteen_bits_on_any_processor():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((65, 7)).astype(np.float32)  # odd: the last row has no neighbor
    weight[10:12, 3] = 5.0  # an outlying pair of one sign
    weight[20:22, 4] = -5.0
    weight[30, 5], weight[31, 5] = 6.0, -6.0  # of both signs, which cancel
    rounded, scale = quantize_weight(weight)
    pairs = rounded[:64].astype(np.int64).reshape(32, 2, 7)
    assert np.maximum(pairs, 0).sum(axis=1).max() <= LARGEST_PAIR
    assert np.minimum(pairs, 0).sum(axis=1).min() >= -LARGEST_PAIR
    assert 255 * LARGEST_PAIR <= 2**15 - 1 + 1  # cut at 32767: off by one at the most
    assert np.abs(rounded[:, 5]).max() == 127  # both signs: all eight bits
    assert np.abs(rounded * scale - weight).max() <= scale.max() * 0.51


def test_integer_products_are_exact_here():
    """On this machine the product of the largest activations and weights is what integers say."""
    rng = np.random.default_rng(0)
    rounded, scale = quantize_weight(np.abs(rng.standard_normal((128, 16))).astype(np.float32))
    states = np.full((1, 3, 128), 255, dtype=np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["q"]),
        helper.make_node("MatMulIntegerToFloat", ["q", "w", "one", "scale", "zero"], ["y"], domain=MICROSOFT),
    ]
    constants = {
        "w": rounded,
        "scale": np.ones_like(scale),
        "one": np.float32(1),
        "zero": np.array(0, dtype=np.uint8),
    }
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 128])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    [found] = session(model).run(None, {"x": states})
    wanted = states.astype(np.int64) @ rounded.astype(np.int64)
    # A pair that reaches 128 is cut by one, 32,767 for 32,640 + 128: at most one per pair of rows.
    assert np.abs(found - wanted).max() <= 64


def test_zero_is_exact_in_activations():
    for low, high in ((-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0)):
        scale, zero = activation_scale(Range(np.float32([low]), np.float32([high])))
        assert 0 <= int(zero) <= 255
        assert (0 - int(zero)) * scale <= min(low, 0) + scale
        assert (255 - int(zero)) * scale >= max(high, 0) - scale


@pytest.mark.parametrize("kind", ["bert", "deberta"])
@pytest.mark.parametrize("with_attention", [False, True])
def test_half_precision_is_near(graphs, kind, with_attention):
    model = fused(graphs[kind]) if with_attention else simplified(graphs[kind])
    feed = random_feed(model, 2, 5, np.random.default_rng(0), VOCABULARY)
    last = last_of(
        model,
        [node.output[0] for node in model.graph.node if node.op_type == "LayerNormalization"][:5],
    )
    assert to_half(model, last, feed) > 20
    assert probe(model, [last], feed)[last].dtype == np.float16
    types = {value.type.tensor_type.elem_type for value in model.graph.output}
    assert types == {TensorProto.FLOAT}
    assert 0 < largest_difference(onnx.load(graphs[kind]), model) < 0.05


def test_a_view_refuses_branches_and_replaced_outputs():
    branch = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "inner", [], [])
    node = helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)
    with pytest.raises(TailcastError, match="graph inside"):
        GraphView(helper.make_model(helper.make_graph([node], "outer", [], [])))
    plain = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(TailcastError, match="output"):
        GraphView(helper.make_model(plain)).replace_uses("y", "x")

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from export.graph import export_graph
from export.passes import graph, int8
from export.passes.attention import fuse_attention
from export.passes.fp16 import to_half
from export.variants.build import build_variant, simplified
from predictors.manifest import EncoderCard, Manifest
from tests.export.conftest import PLAIN
from tests.training.checkpoints import predictor
from tests.training.tiny import ENCODERS, tiny_bert


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def fused(path) -> ir.Model:
    model = simplified(path)
    assert fuse_attention(model, max_length=LONGEST, vocabulary=VOCABULARY) == 2
    return model


@pytest.mark.parametrize("kind", ["bert", "deberta", "opt"])
def test_fused_attention_gives_the_same_numbers(graphs, kind):
    model = fused(graphs[kind])
    layers = [node for node in model.graph if node.op_type == "MultiHeadAttention"]
    assert ["unidirectional" in node.attributes for node in layers] == [kind == "opt"] * 2
    # DeBERTa's gathering and its repeated tables are gone.
    gone = {"Softmax", "GatherElements", "Tile"} if kind == "deberta" else {"Softmax"}
    assert not operators(model).keys() & gone
    assert largest_difference(ir.load(graphs[kind]), model) < 2e-5


def test_attention_that_reads_wrongly_is_left_alone(graphs):
    # Scores are squashed on their way to the softmax: it still looks like attention but is none.
    model = simplified(graphs["bert"])
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    scores = softmax.inputs[0]
    squashed = graph.add(model.graph, "Mul", scores, graph.add_constant(model.graph, "half", np.float32(0.5)))
    graph.replace_uses(scores, squashed, [softmax])
    graph.finish(model)
    changed = model.clone()
    # The factor is on the mask too, which the reading has no place for; the other layer is fused.
    assert fuse_attention(model, max_length=LONGEST, vocabulary=VOCABULARY) == 1
    assert largest_difference(changed, model) < 2e-5


def feed_of(model):
    return graph.random_feed(model, 2, 5, np.random.default_rng(0), VOCABULARY)


def measured(model):
    rng = np.random.default_rng(3)
    products = int8.find_products(model, feed_of(model))
    feeds = [graph.random_feed(model, 1, int(rng.integers(2, LONGEST)), rng, VOCABULARY) for _ in range(16)]
    return model, products, int8.measure_ranges(model, [product.source for product in products], feeds)


def stand_out(model, factor):
    """Makes one channel of every normalised state that much wider than the others, as in trained encoders."""
    for node in model.graph:
        if node.op_type == "LayerNormalization":
            gain = graph.stored(node.inputs[1]).copy()
            gain[7] *= factor
            graph.replace_uses(node.inputs[1], graph.add_constant(model.graph, "gain", gain), [node])
    graph.finish(model)
    return model


def unevenness(ranges):
    """Of normalised states: how much wider the widest channel is than the usual one, at most."""
    normalised = (value for value in ranges if value.producer().op_type == "LayerNormalization")
    widths = [ranges[value].high - ranges[value].low for value in normalised]
    return max(width.max() / np.median(width) for width in widths)


def test_smoothing_changes_no_number(graphs):
    model = stand_out(fused(graphs["bert"]), 30)
    plain = model.clone()
    _, products, ranges = measured(model)
    # Query, key and value share a source; then the output and the two of the feed-forward part.
    assert (len(products), len({product.source for product in products})) == (12, 8)
    before = unevenness(ranges)
    # Normalised states and attention's context; what follows a GELU is not linear.
    assert int8.smooth(model, products, ranges) == 6
    assert largest_difference(plain, model) < 2e-5
    assert unevenness(measured(model)[2]) < 0.5 * before


def test_int8_is_near_and_independent_of_batch_mates(graphs):
    model = simplified(graphs["bert"])
    fuse_attention(model, max_length=LONGEST, vocabulary=VOCABULARY)
    assert int8.quantize(*measured(model)) == 12
    assert int8.quantize_tables(model, least_rows=50) == 2
    assert operators(model)["MatMulIntegerToFloat"] == 12
    assert set(model.graph.opset_imports) >= {"", graph.MICROSOFT}
    small, rng = graph.session(model), np.random.default_rng(5)
    together = graph.random_feed(model, 6, 30, rng, VOCABULARY)
    [batch] = small.run(["mu"], together)
    alone = [
        small.run(["mu"], {name: values[row : row + 1, :length] for name, values in together.items()})[0][0]
        for row, length in enumerate(together["attention_mask"].sum(axis=1))
    ]
    [expected] = graph.session(ir.load(graphs["bert"])).run(["mu"], together)
    # Weights eight times the usual make this network amplify every rounding; a trained one loses a tenth of this.
    assert np.sqrt(((batch - expected) ** 2).mean()) < 0.3 * expected.std()
    assert np.abs(batch - alone).max() < 0.01 * expected.std()


def test_an_output_is_shifted_and_nothing_else(graphs):
    model = simplified(graphs["bert"])
    plain = model.clone()
    graph.shift_output(model, "mu", 0.25)
    names = [value.name for value in plain.graph.outputs]
    assert [value.name for value in model.graph.outputs] == names
    feed = graph.random_feed(model, 3, 9, np.random.default_rng(1), VOCABULARY)
    before, after = (
        dict(zip(names, graph.session(one).run(names, feed), strict=True)) for one in (plain, model)
    )
    np.testing.assert_allclose(after.pop("mu"), before.pop("mu") + 0.25, atol=1e-6)
    for name, values in after.items():
        np.testing.assert_array_equal(values, before[name])


def test_int8_has_the_mean_location_of_the_calibration_prompts(graphs):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, VOCABULARY, size=length) for length in (3, 9, 20)]
    model, steps = build_variant(
        graphs["bert"], "int8", prompts, max_length=LONGEST, vocabulary=VOCABULARY, seed=0
    )
    assert steps["shifted_outputs"] == 1
    means = []
    for one in (simplified(graphs["bert"]), model):
        runner = graph.session(one)
        feeds = (
            graph.random_feed(one, 1, len(tokens), rng, 1) | {"input_ids": tokens[None]} for tokens in prompts
        )
        means.append(np.mean([runner.run(["mu"], feed)[0] for feed in feeds]))
    assert means[0] == pytest.approx(means[1], abs=1e-5)


def test_weights_cannot_overflow_sixteen_bits_on_any_processor():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((65, 7)).astype(np.float32)  # odd: the last row has no neighbor
    weight[10:12, 3] = 5.0  # an outlying pair of one sign
    weight[20:22, 4] = -5.0
    weight[30, 5], weight[31, 5] = 6.0, -6.0  # of both signs, which cancel
    rounded, scale = int8.quantize_weight(weight)
    pairs = rounded[:64].astype(np.int64).reshape(32, 2, 7)
    assert np.maximum(pairs, 0).sum(axis=1).max() <= int8.LARGEST_PAIR
    assert np.minimum(pairs, 0).sum(axis=1).min() >= -int8.LARGEST_PAIR
    assert 255 * int8.LARGEST_PAIR <= 2**15 - 1 + 1  # cut at 32767: off by one at the most
    assert np.abs(rounded[:, 5]).max() == 127  # both signs: all eight bits
    assert np.abs(rounded * scale - weight).max() <= scale.max() * 0.51


@pytest.mark.parametrize("kind", ["bert", "deberta"])
@pytest.mark.parametrize("with_attention", [False, True])
def test_half_precision_is_near(graphs, kind, with_attention):
    model = fused(graphs[kind]) if with_attention else simplified(graphs[kind])
    feed = feed_of(model)
    last = [node.outputs[0] for node in model.graph if node.op_type == "LayerNormalization"][4]
    assert to_half(model, last, feed) > 20
    assert graph.probe(model, [last], feed)[last].dtype == np.float16
    assert {value.dtype for value in model.graph.outputs} == {ir.DataType.FLOAT}
    assert 0 < largest_difference(ir.load(graphs[kind]), model) < 0.05


LONGEST = 48
# All tiny vocabularies have these.
VOCABULARY = 20
FIELDS = {"max_length": LONGEST, "truncation_side": "right", "pad_token_id": 0, "nu": 3.5}
CARD = EncoderCard(architecture="bert", source="fake", num_parameters=1, num_layers=None, width=1)
MANIFEST = Manifest.model_construct(artifact_id="tiny", created="", heads=("length",), encoder=CARD, **FIELDS)


def _bert(folder: Path) -> str:
    # Wide enough that its products are worth quantising.
    return tiny_bert(folder, hidden_size=64)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Exported graphs of tiny encoders, by kind; tests must not write into them."""
    root = tmp_path_factory.mktemp("graphs")
    paths = {}
    for kind, make in {"bert": _bert, "deberta": ENCODERS["deberta"], "opt": ENCODERS["opt"]}.items():
        options = PLAIN | ({"pooling": ("mean", "last")} if kind == "opt" else {})
        model = predictor(make(root / kind), **options)
        # Attention that prefers some tokens: with the usual small weights every mask would do.
        with torch.no_grad():
            for name, weight in model.encoder.named_parameters():
                if weight.ndim == 2 and "word_embeddings" not in name:
                    weight.mul_(8)
        paths[kind] = root / f"{kind}.onnx"
        # The older exporter is fast, but gives OPT a branch that no pass reads.
        export_graph(model, MANIFEST, paths[kind], legacy_exporter=kind != "opt")
    return paths


def largest_difference(one: ir.Model, other: ir.Model) -> float:
    """Of all outputs over edge shapes, with padding."""
    rng = np.random.default_rng(1)
    first, second = graph.session(one), graph.session(other)
    largest = 0.0
    for batch, seq in ((1, 1), (1, 2), (3, 7), (4, 33), (2, LONGEST)):
        feed = graph.random_feed(one, batch, seq, rng, VOCABULARY)
        for left, right in zip(first.run(None, feed), second.run(None, feed), strict=True):
            largest = max(largest, float(np.abs(left - right).max()))
    return largest

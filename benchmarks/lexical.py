"""Time of a prediction by trees on lexical features, and by an encoder's artifact in the same run, interleaved.

    python benchmarks/lexical.py [--artifact LEXICAL] [--encoder ARTIFACT] [--repeats 9] [--requests 500]

Prompts are those of the shipped sample set, and longer ones made by joining them. Without --artifact, trees of the size
that the default options give (300 trees of 31 leaves in each of two ensembles) are trained on drawn lengths. Times are medians
over the repeats of CPU time per request, one thread: features alone, features and trees for one request at a time,
and for all requests at once; and, with --encoder, an encoder's artifact for one request at a time.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from predictors.lexical import FEATURE_NAMES, LexicalFeatures
from predictors.runtime import ArtifactRuntime, open_runtime
from training.lexical.config import TrainLexicalConfig
from training.lexical.train import train_lexical

SAMPLES = Path(__file__).parent.parent / "examples" / "quickstart" / "data" / "smollm2_135m.parquet"


def prompts_of(count: int) -> list[str]:
    """Different prompts, every third of them several joined."""
    rng = np.random.default_rng(0)
    texts = pq.read_table(SAMPLES, columns=["prompt"]).column("prompt").unique().to_pylist()
    found = []
    for number in range(count):
        several = 1 if number % 3 else int(rng.integers(2, 20))
        found.append("\n".join(rng.choice(texts, several)))
    return found


def trained(folder: Path, num_trees: int) -> Path:
    """An artifact on lengths drawn at random: as large as a real one, and worth nothing else."""
    rng = np.random.default_rng(0)
    texts = list(dict.fromkeys(prompts_of(3000)))
    medians = 40 * np.array([len(text) for text in texts]) ** 0.4 * rng.lognormal(0, 0.5, len(texts))
    table = pa.table(
        {
            "prompt_id": [str(number) for number in range(len(texts))],
            "model": [f"m{number % 5}" for number in range(len(texts))],
            "prompt": texts,
            "output_tokens": (medians[:, None] * rng.lognormal(0, 0.4, (len(texts), 6))).astype(int).tolist(),
        }
    )
    pq.write_table(table, folder / "lengths.parquet")
    config = TrainLexicalConfig(
        data=[str(folder / "lengths.parquet")],
        out=str(folder / "artifact"),
        num_trees=num_trees,
        learning_rate=0.01,
        min_samples_leaf=5,
    )
    train_lexical(config)
    return folder / "artifact"


def one_by_one(runtime: ArtifactRuntime, prompts: Sequence[str]) -> None:
    """A call for each prompt, served model and temperature told where the artifact takes them."""
    manifest = runtime.artifact.manifest
    served = [manifest.served_models[0]] if manifest.conditioning is not None else None
    degrees = [0.7] if manifest.conditioning is not None else None
    for prompt in prompts:
        runtime.predict([prompt], served, degrees)


def measure(lexical: Path, encoder: Path | None, repeats: int, count: int) -> None:
    """Prints the table."""
    prompts = prompts_of(count)
    trees = open_runtime(lexical, provider="cpu")
    features = LexicalFeatures()
    few = prompts[: max(count // 20, 1)]
    sides: dict[str, tuple[int, Callable[[], object]]] = {
        "features, one request at a time": (count, lambda: [features.extract([text]) for text in prompts]),
        "features and trees, one request at a time": (count, lambda: one_by_one(trees, prompts)),
        f"features and trees, {count} requests at once": (
            count,
            lambda: trees.predict(prompts, batch_size=count),
        ),
    }
    if encoder is not None:
        other = open_runtime(encoder, provider="cpu")
        sides["encoder artifact, one request at a time"] = (len(few), lambda: one_by_one(other, few))
    for _, call in sides.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, (number, call) in sides.items():
            start = time.process_time()
            call()
            times[name].append((time.process_time() - start) / number * 1e6)
    base = median(times["features and trees, one request at a time"])
    size = (lexical / "model.onnx").stat().st_size
    lengths = np.array([len(text) for text in prompts])
    print(
        f"{len(FEATURE_NAMES)} features; trees of {size / 1e6:.1f} MB; prompts of {np.median(lengths):.0f} characters"
    )
    print(f"(median; longest {lengths.max()})\n")
    print("| method | microseconds per request | relative |")
    print("| --- | ---: | ---: |")
    for name, values in times.items():
        print(f"| {name} | {median(values):.1f} | {median(values) / base:.2f} |")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--artifact", type=Path)
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--trees", type=int, default=300)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, seed 0\n")
    with tempfile.TemporaryDirectory() as folder:
        lexical = options.artifact or trained(Path(folder), options.trees)
        measure(lexical, options.encoder, options.repeats, options.requests)


if __name__ == "__main__":
    main()

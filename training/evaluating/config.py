"""Options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler_core.errors import InputError
from scheduler_core.threads import check_threads


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Compare a predictor's distributions with sampled answers: parameters, ranking, coverage, CRPS, PIT."""

    INPUTS = ("predictor", "data", "beside", "baselines_from")
    OUTPUTS = ("json", "html", "markdown", "figure", "predictions")

    predictor: str
    """Artifact folder of export-onnx or train-lexical, or checkpoint folder of train."""
    data: str
    """File with fits (fits/2), or with answer lengths (samples/2 or lists, CASTILLO's files too), which are fitted first; with prompts."""
    json: str
    """JSON file to write."""
    html: str | None = None
    """HTML page to write, with figures."""
    markdown: str | None = None
    """Markdown file to write: the table of all predictors, by data set and served model."""
    figure: str | None = None
    """PNG file to write: predicted against fitted parameters, and calibration."""
    predictions: str | None = None
    """Parquet file to write: predicted and fitted mu and sigma of each group."""
    beside: list[str] | None = None
    """Other predictors in the same table, each NAME=FOLDER; the option can be given several times."""
    baselines_from: str | None = None
    """File of answer lengths to make the baselines from, instead of those kept with the predictor."""
    ceiling: bool = True
    """Also say what the number of answers allows at best: half of the answers seen, true parameters."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which prompts: all, or a split as the predictor's training made it (by prompt id)."""
    served_model: str | None = None
    """Use only rows whose column `model` has this value."""
    max_groups: int | None = None
    """At most so many groups, drawn by seed; unset = all."""
    seed: int = 0
    """Seed of the groups drawn and of the noise ceiling."""
    censoring: Literal["right", "none"] = "right"
    """What a cut answer means, when the data are answer lengths; see fit-dist."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    max_tokens: int | None = None
    """Cap on all answers, when the data are answer lengths; see fit-dist. Unset, a file with CASTILLO's columns gets its 15000."""
    batch_size: int = 16
    """Prompts per call of the model."""
    threads: int | None = None
    """Threads of the model; unset: one for an artifact, torch's own choice for a checkpoint."""
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_tokens", "max_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(name, value, "a whole number of at least 1")
        check_threads("threads", self.threads)
        if self.seed < 0:
            raise InputError("seed", self.seed, "a whole number of at least 0")
        if not all(self.keys):
            raise InputError("group_by", self.group_by, "column names separated by commas")
        self.others  # noqa: B018  (raises for a wrong NAME=FOLDER)

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))

    @property
    def others(self) -> dict[str, str]:
        """Name -> folder of the predictors beside."""
        found: dict[str, str] = {}
        for entry in self.beside or []:
            name, equals, folder = entry.partition("=")
            if not name.strip() or not equals or not folder or name.strip() in found:
                raise InputError("beside", entry, "NAME=FOLDER with a name of its own")
            if name.strip() == "predictor":
                raise InputError("beside", entry, "another name: the table's first row is called so")
            found[name.strip()] = folder
        return found

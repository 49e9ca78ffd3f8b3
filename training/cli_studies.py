"""The command `study-lengths`: the paper's three studies of length distributions, on any file of answers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scheduler_core.command import entry_point, run_command
from scheduler_core.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from training.studies.groups import StudyGroups
    from training.studies.outputs import StudyResult

USAGE = """usage: study-lengths COMMAND SAMPLES --out DIR [OPTIONS]

Commands:
  families     which family of distributions fits each prompt's answer lengths, and how heavy their tails are
  nu           how well the log-t fits, by its degrees of freedom
  sample-size  how many answers to a prompt its distribution needs

Each writes DIR/COMMAND.json, .png and .html. study-lengths COMMAND --help explains the options.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What all studies take."""

    INPUTS = ("samples",)
    OUTPUTS = (
        "{out}/families.json",
        "{out}/families.png",
        "{out}/families.html",
        "{out}/nu.json",
        "{out}/nu.png",
        "{out}/nu.html",
        "{out}/sample-size.json",
        "{out}/sample-size.png",
        "{out}/sample-size.html",
    )

    samples: str
    """Answer lengths in any form that fit-dist takes."""
    out: str
    """Folder to write the study's .json, .png and .html to."""
    group_by: str = "prompt_id,model"
    """Columns that name a group, separated by commas."""
    max_tokens: int | None = None
    """Cap on all answers: longer ones count as cut there. Needed for lists without a column `finished`, where answers of that length or more count as cut."""
    censoring: Literal["right", "none"] = "right"
    """What a cut answer means: right = at least that long; none = just that long (the TIE paper's way)."""
    max_groups: int | None = None
    """At most so many groups, drawn by seed; unset = all (sample-size: 1000 of those that qualify)."""
    seed: int = 0
    """Seed of everything drawn."""
    progress: bool = True
    """Show progress bars on a terminal, a line now and then elsewhere."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError("max_tokens", self.max_tokens, "a whole number of at least 1, or unset")
        if self.max_groups is not None and self.max_groups < 1:
            raise InputError("max_groups", self.max_groups, "a whole number of at least 1, or unset")
        if self.seed < 0:
            raise InputError("seed", self.seed, "a whole number of at least 0")
        if not all(self.keys) or len(set(self.keys)) < len(self.keys):
            raise InputError("group_by", self.group_by, "column names separated by commas, each once")

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name a group."""
        return tuple(name.strip() for name in self.group_by.split(","))


@dataclass(frozen=True, kw_only=True)
class FamiliesConfig(StudyConfig):
    """Fit six families to each group's answer lengths and say which fits, as in TIE, table 1, and how heavy the tails are."""

    nu: float = 3.5
    """Degrees of freedom of the log-t with two parameters."""
    integers: bool = False
    """Take a length x for the interval [x - 1/2, x + 1/2], whose probability is its likelihood; many times slower, above all with the bootstrap."""
    bootstrap: int = 200
    """Replicates of the parametric bootstrap for each group and family; 0 = none."""
    bootstrap_groups: int = 500
    """At most so many groups are bootstrapped, drawn by seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.bootstrap and not 19 <= self.bootstrap <= 100_000:
            raise InputError("bootstrap", self.bootstrap, "0 for none, or 19 to 100000 replicates")
        if self.bootstrap_groups < 1:
            raise InputError("bootstrap_groups", self.bootstrap_groups, "a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class NuConfig(StudyConfig):
    """Fit the log-t with each of several degrees of freedom nu to each group, as in TIE, figure 8."""

    grid: str = "1,1.5,2,2.5,3,3.5,4,5,6,7,8,9,10,inf"
    """Values of nu, separated by commas; inf = log-normal."""
    integers: bool = False
    """Take a length x for the interval [x - 1/2, x + 1/2], whose probability is its likelihood."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.values)) < len(self.values) or not all(value > 0 for value in self.values):
            raise InputError("grid", self.grid, "numbers above 0 separated by commas, each once")

    @property
    def values(self) -> tuple[float, ...]:
        """The grid as numbers."""
        return tuple(_numbers("grid", self.grid, float))


@dataclass(frozen=True, kw_only=True)
class SampleSizeConfig(StudyConfig):
    """Fit random parts of each group's answers and say how far off the fits are, as in TIE, figure 7."""

    counts: str = "3,4,5,7,10,15,20,30,50,70,100"
    """Numbers of answers k, separated by commas; those above the largest group's are left out."""
    min_samples: int | None = None
    """Only groups with so many answers; unset = 20, or the most that any group has."""
    repeats: int = 20
    """Random parts for each group and k."""
    nu: float = 3.5
    """Degrees of freedom of the log-t."""
    cut_share: float = 0.3
    """Share of each group's longest answers that is cut to show what that does; 0 = none."""
    simulate: bool = False
    """Draw the answers from the file's fits, so that the truth is known and k may exceed the number of answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.nu < float("inf"):
            raise InputError("nu", self.nu, "a finite number above 0")
        if self.simulate and self.min_samples is not None:
            raise InputError(
                "min_samples", self.min_samples, "unset with --simulate, which draws the answers"
            )
        _numbers("counts", self.counts, int)

    @property
    def values(self) -> tuple[int, ...]:
        """The counts as numbers."""
        return tuple(_numbers("counts", self.counts, int))


def _numbers(field: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise InputError(field, text, "numbers separated by commas") from error


def _families(config: FamiliesConfig, groups: StudyGroups) -> StudyResult:
    from training.studies.families import study_families
    from training.studies.figures import draw_families
    from training.studies.outputs import StudyResult
    from training.studies.tables import families_tables

    study = study_families(
        groups,
        nu=config.nu,
        integers=config.integers,
        replicates=config.bootstrap,
        bootstrap_groups=config.bootstrap_groups,
        seed=config.seed,
        progress=config.progress,
    )
    return StudyResult(
        "families",
        "Families of answer-length distributions",
        _lead(config, study.content["groups"]),
        study.content,
        families_tables(study.content, config.nu),
        "Share of groups that each family fits, by three tests; its p-values; share of groups where it has the best AIC",
        lambda path: draw_families(study, config.nu, path),
    )


def _nu(config: NuConfig, groups: StudyGroups) -> StudyResult:
    from training.studies.figures import draw_nu
    from training.studies.nu import study_nu
    from training.studies.outputs import StudyResult
    from training.studies.tables import nu_tables

    study = study_nu(
        groups, config.values, integers=config.integers, seed=config.seed, progress=config.progress
    )
    return StudyResult(
        "nu",
        "Degrees of freedom of the log-t",
        _lead(config, study.content["groups"]),
        study.content,
        nu_tables(study.content),
        "Mean p-value, pass rate, likelihood and Anderson-Darling statistic over nu, and each group's own nu",
        lambda path: draw_nu(study.content, study.free_nu, path),
    )


def _sample_size(config: SampleSizeConfig, groups: StudyGroups) -> StudyResult:
    from training.studies.figures import draw_sample_size
    from training.studies.outputs import StudyResult
    from training.studies.sample_size import study_sample_size
    from training.studies.tables import sample_size_tables

    content = study_sample_size(
        groups,
        config.values,
        nu=config.nu,
        repeats=config.repeats,
        min_samples=config.min_samples,
        cut_share=config.cut_share,
        simulate=config.simulate,
        max_groups=1000 if config.max_groups is None else config.max_groups,
        seed=config.seed,
        progress=config.progress,
    )
    found = content["groups"]
    how = (
        "SIMULATED: answers drawn from the log-t fits of these groups, errors against the parameters drawn from"
        if config.simulate
        else f"groups with at least {found['min_samples']} answers, errors against the fit to all of a group's answers"
    )
    lead = (
        f"{Path(config.samples).name}: {found['num_studied']} of {found['num_in_file']} groups, {how}; "
        f"{config.repeats} random parts of k answers each."
    )
    return StudyResult(
        "sample-size",
        "How many answers a prompt's distribution needs" + (" (simulated)" if config.simulate else ""),
        lead,
        content,
        sample_size_tables(content),
        "Error of mu, of sigma and of the censored mean over the number of answers, and the bias from cut answers",
        lambda path: draw_sample_size(content, path),
    )


def _lead(config: StudyConfig, found: dict[str, Any]) -> str:
    share = found["num_censored"] / found["num_samples"]
    return (
        f"{Path(config.samples).name}: {found['num_groups']} of {found['num_in_file']} groups, {found['num_samples']} answers, "
        f"{100 * share:.2f} % of them cut; {found['num_tested']} groups tested (the others have equal answers only, cut "
        "ones only, or fewer than 3)."
    )


#: Name -> configuration, study, and whether the study itself chooses among the groups.
STUDIES: dict[str, tuple[type[StudyConfig], Callable[[Any, StudyGroups], StudyResult], bool]] = {
    "families": (FamiliesConfig, _families, False),
    "nu": (NuConfig, _nu, False),
    "sample-size": (SampleSizeConfig, _sample_size, True),
}


def study_lengths(name: str, config: StudyConfig) -> dict[str, Any]:
    """Carries out one study and writes its files; returns what went into the JSON file."""
    try:
        import matplotlib  # noqa: F401
        import scipy  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "scipy", "train") from error
    from scheduler_core.files import check_shared_folder, shared_folder
    from training.fitting.jobs.pipeline import input_identity
    from training.fitting.reading.formats import open_samples
    from training.studies.groups import read_groups
    from training.studies.outputs import write_study
    from training.versions import versions_of

    _, study, chooses = STUDIES[name]
    files = [f"{name}.{suffix}" for suffix in ("json", "png", "html")]
    out = check_shared_folder(config.out, "study", files)
    groups = read_groups(
        config.samples,
        keys=config.keys,
        max_tokens=config.max_tokens,
        censoring=config.censoring,
        max_groups=None if chooses else config.max_groups,
        seed=config.seed,
        progress=config.progress,
    )
    result = study(config, groups)
    run = {
        "config": asdict(config),
        "samples": input_identity(open_samples(config.samples, keys=config.keys)),
        "versions": versions_of(("numpy", "scipy", "numba", "matplotlib")),
    }
    log.info("%s", result.lead)
    write_study(result, shared_folder(out, "study", files), run)
    return result.content | run


@entry_point("study-lengths", extra="train")
def main(args: Sequence[str] | None = None) -> int:
    """Entry point of the console script `study-lengths`; returns the exit code."""
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        (sys.stdout if words else sys.stderr).write(USAGE)
        return 0 if words else 2
    if words[0] not in STUDIES:
        raise InputError("COMMAND", words[0], ", ".join(STUDIES))
    name = words[0]

    def command(config: StudyConfig) -> None:
        study_lengths(name, config)

    return run_command(
        f"study-lengths {name}",
        STUDIES[name][0],
        command,
        positionals=("samples",),
        extra="train",
        args=words[1:],
    )


if __name__ == "__main__":
    sys.exit(main())

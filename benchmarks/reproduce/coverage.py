"""The study of every table and figure of the five papers, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Covered:
    """Tables or figures of a paper and their studies.

    Attributes:
        paper: Short name of the paper, as in the studies.
        where: Tables or figures.
        studies: Names of their studies; can be empty.
        note: Reason for no study, or the differences from the paper.
    """

    paper: str
    where: str
    studies: tuple[str, ...] = ()
    note: str = ""


_TIERS, _SEMANTIC, _SLAI = "Multi-tier Llumnix", "Semantic scheduling", "RAD and SLAI"
_UNIBOOST, _TIE = "UniBoost", "TIE"
_DRAWING = "a drawing of the design, without a measurement"
_COST = "cost per latency: see P99 E2E, because both systems have the same number of replicas"
_CALLS = "needs a real engine and conversations with an emergency line, which are not public"
_LOAD = "without requests per second, which are the load"
_MOE = "Mistral-7B alone: the simulator's data sheets are dense transformers, and it is the only one with public outputs"
_PANGU = "OpenPangu: neither a data sheet nor public outputs"
_ORDER = "a plot of the order of the outputs; its effect is in table 3"

COVERAGE: tuple[Covered, ...] = (
    Covered(_TIERS, "table 1", (), "the request lengths: input of all its studies"),
    Covered(_TIERS, "table 2", ("multitier-tables",), _COST),
    Covered(_TIERS, "table 3", ("multitier-tables",), _COST),
    Covered(_TIERS, "table 4", ("multitier-tables",), _COST),
    Covered(_TIERS, "figure 1", (), _DRAWING),
    Covered(_TIERS, "figure 2", (), _DRAWING),
    Covered(_TIERS, "figure 3", (), "headroom by tier, a formula: checked in the tests of routing"),
    Covered(_TIERS, "figure 4", (), _DRAWING),
    Covered(_TIERS, "figure 5", ("multitier-tiers",)),
    Covered(_TIERS, "figure 6", ("multitier-figures",)),
    Covered(_TIERS, "figure 7", ("multitier-figures",)),
    Covered(_TIERS, "figure 8", ("multitier-tiers",)),
    Covered(_TIERS, "figure 9", ("multitier-tiers",)),
    Covered(_SEMANTIC, "table 1", ("semantic-predictor",)),
    Covered(_SEMANTIC, "table 2", ("semantic-predictor",)),
    Covered(_SEMANTIC, "figure 1", (), _DRAWING),
    Covered(_SEMANTIC, "figure 2", ("semantic-errors", "semantic-spikes")),
    Covered(_SEMANTIC, "figure 3", (), _CALLS),
    Covered(_SEMANTIC, "figure 4", ("semantic-engines",)),
    Covered(_SEMANTIC, "figure 5", (), _CALLS),
    Covered(_SLAI, "theorems 1 and 2", ("rad-stability",)),
    Covered(_SLAI, "table 1", (), "the request lengths: input of all its studies"),
    Covered(_SLAI, "figures 1 to 5", (), "drawings of transformers, tiles and schedulers, without a measurement"),
    Covered(_SLAI, "figure 6", (), "measured chunk timings of the card: input of all its studies"),
    Covered(_SLAI, "figure 7", ("slai-figure7",)),
    Covered(_SLAI, "figure 8", ("slai-figure8",)),
    Covered(_SLAI, "figure 9", ("slai-figure7",), "without counts by prompt length, which have no printed numbers"),
    Covered(_SLAI, "figure 10", ("slai-figure7",)),
    Covered(_SLAI, "figure 11", ("slai-appendix",)),
    Covered(_SLAI, "figure 12", ("slai-appendix",)),
    Covered(_UNIBOOST, "table 1", (), "a comparison in words"),
    Covered(_UNIBOOST, "table 2", ("uniboost-table2",)),
    Covered(_UNIBOOST, "table 3", ("uniboost-starvation",)),
    Covered(_UNIBOOST, "table 4", ("uniboost-starvation",)),
    Covered(_UNIBOOST, "table 5", ("uniboost-starvation",)),
    Covered(_UNIBOOST, "table 6", ("uniboost-sensitivity",), _LOAD),
    Covered(_UNIBOOST, "table 7", ("uniboost-sensitivity",), _LOAD),
    Covered(_UNIBOOST, "table 8", ("uniboost-chunks",)),
    Covered(_UNIBOOST, "table 9", ("uniboost-cluster",)),
    Covered(_UNIBOOST, "table 10", ("uniboost-cluster",)),
    Covered(_UNIBOOST, "figure 1", (), "lengths of the data sets, which are not public with the paper's outputs"),
    Covered(_UNIBOOST, "figure 2", (), "variation of sampled outputs: a measurement of models, not of scheduling"),
    Covered(_UNIBOOST, "figure 3", (), "an example by hand"),
    Covered(_UNIBOOST, "figure 4", (), _DRAWING),
    Covered(_UNIBOOST, "figure 5", (), _DRAWING),
    Covered(_UNIBOOST, "figure 6", ("uniboost-figure6",)),
    Covered(_UNIBOOST, "figure 7", ("uniboost-ablation",), "with Llama-3-8B; CodeLlama-34B has no data sheet here"),
    Covered(_UNIBOOST, "figure 8", ("uniboost-figure8",)),
    Covered(_UNIBOOST, "figure 9", (), "gamma over time on a bursty trace that the paper does not fully specify"),
    Covered(_TIE, "table 1", ("tie-table1",), "on CASTILLO, 10 samples per prompt"),
    Covered(_TIE, "table 2", ("tie-table2",)),
    Covered(_TIE, "table 3", ("tie-table3",), "predictors are trained on CASTILLO (TIE's also on smaller sources) and not on LMSYS or Alpaca alone"),
    Covered(_TIE, "table 4", ("tie-table4",), "families: one head each on a frozen encoder, compared with a log-t head with the same training"),
    Covered(_TIE, "table 5", ("tie-table5",), _MOE),
    Covered(_TIE, "table 6", ("tie-table5",), _MOE),
    Covered(_TIE, "table 7", (), _PANGU),
    Covered(_TIE, "table 8", (), _PANGU),
    Covered(_TIE, "section 6.4, overhead", (), "4.26 ms per request on the paper's server; `benchmarks/` measures our scheduler and predictors"),
    Covered(_TIE, "figure 1", (), "an example of output lengths"),
    Covered(_TIE, "figure 2", (), _DRAWING),
    Covered(_TIE, "figure 3", (), _DRAWING),
    Covered(_TIE, "figure 4", ("tie-table2",), "at 30 and 100 requests per second, for which the text has numbers"),
    Covered(_TIE, "figure 5", (), _ORDER),
    Covered(_TIE, "figure 6", (), "lengths of the data sets, which are not public with the paper's outputs"),
    Covered(_TIE, "figure 7", ("tie-figure7",), "on samples drawn from fits"),
    Covered(_TIE, "figure 8", ("tie-figure8",), "on CASTILLO, 10 samples per prompt"),
    Covered(_TIE, "figure 9", (), _ORDER),
    Covered(_TIE, "figure 10", (), _ORDER),
)  # fmt: skip

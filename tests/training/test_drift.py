"""`evaluate-stream`: the test for drift, running calibration, sliding coverage, bad lines."""

import json
import math
import sys
from io import BytesIO

import numpy as np
import pytest
from scipy import stats

from scheduler_core.prediction.drift import DriftDetector
from scheduler_core.prediction.outcome import parse_outcome
from training.commands.evaluate_stream import OTHERS, DriftStream, StreamConfig, main


def run_length(rng, arl, limit, interval):
    detector = DriftDetector(arl)
    alarms = (step for step in range(1, limit + 1) if detector.update(*interval(rng.random())))
    return next(alarms, limit)


@pytest.mark.parametrize(
    "interval",
    [
        lambda u: (u, u),
        # truncated at a max_tokens whose probability is 0.7
        lambda u: (u, u) if u < 0.7 else (0.7, 1.0),
        # integer tokens: probabilities up to a tenth
        lambda u: (math.floor(10 * u) / 10, math.floor(10 * u) / 10 + 0.1),
    ],
    ids=["exact", "truncated", "integer"],
)
def test_the_mean_time_to_a_false_alarm_is_at_least_as_stated(interval):
    rng = np.random.default_rng(7)
    arl, runs = 100, 150
    # Runs that are stopped early count with less than their length: the bound must hold all the same.
    lengths = [run_length(rng, arl, 12 * arl, interval) for _ in range(runs)]
    assert np.mean(lengths) + 3 * np.std(lengths) / math.sqrt(runs) >= arl
    assert np.mean(lengths) >= 0.9 * arl


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda t: t + 1.0, {"longer", "more_tail"}),
        (lambda t: t - 1.0, {"shorter", "less_tail"}),
        (lambda t: 2.5 * t, {"wider", "more_tail"}),
        (lambda t: 0.3 * t, {"narrower", "less_tail"}),
    ],
    ids=["longer", "shorter", "wider", "narrower"],
)
def test_a_change_is_detected_soon_and_named(change, reasons):
    rng = np.random.default_rng(1)
    detector = DriftDetector(100_000)
    assert not any(detector.update(u, u) for u in rng.random(500).tolist())
    draws = (float(stats.t.cdf(change(rng.standard_t(3.5)), 3.5)) for _ in range(400))
    assert any(detector.update(u, u) for u in draws)
    assert detector.reason in reasons
    detector.reset()
    assert (detector.value, detector.num_steps) == (0.0, 0)


def stream_of(**options):
    return DriftStream(StreamConfig(stream="-", **options))


def outcomes(count, *, shift=0.0, scale=1.0, cap=None, model="m", seed=0):
    rng = np.random.default_rng(seed)
    for number in range(count):
        mu, sigma = rng.normal(5, 1), rng.uniform(0.2, 0.6)
        x = math.exp(min(mu + sigma * (shift + scale * rng.standard_t(3.5)), 15.0))
        tokens = max(1, round(x))
        line = {"mu": mu, "sigma": sigma, "served_model": model, "output_tokens": tokens, "time": number}
        if cap:
            line |= {"output_tokens": min(tokens, cap), "finished": tokens < cap, "max_tokens": cap}
        yield json.dumps(line)


def test_a_calibrated_stream_is_quiet_and_a_changed_one_is_not():
    stream = stream_of()
    quiet = list(stream.feed(outcomes(3000, cap=400)))
    assert [event["event"] for event in quiet] == ["state"] * 3
    calibration = quiet[-1]["calibration"]
    assert (calibration["num_outputs"], calibration["num_window"]) == (3000, 1000)
    for name, level in (("p50", 0.5), ("p90", 0.9)):
        error = 4 * math.sqrt(level * (1 - level) / 600)  # as many have that quantile below max_tokens
        assert calibration["before"]["coverage"][name] == pytest.approx(level, abs=error)
    changed = list(stream.feed(outcomes(3000, shift=1.0, cap=400, seed=1)))
    alarms = [event for event in changed if event["event"] == "alarm"]
    assert 3000 < alarms[0]["line"] < 3300
    # the calibration is put in use and moves towards the change until the detector is content
    last = changed[-1]["calibration"]
    assert len(alarms) < 12
    assert last["before"]["coverage"]["p50"] < 0.35
    assert last["after"]["coverage"]["p50"] == pytest.approx(0.5, abs=0.1)
    *states, end = stream.finish()
    assert states[0]["num_outcomes"] == end["num_outcomes"] == 6000
    assert end["num_alarms"] == len(alarms)
    for event in (*quiet, *changed, *states, end):
        assert json.loads(json.dumps(event, allow_nan=False)) == event


def test_served_models_are_watched_apart_and_their_number_is_bounded():
    stream = stream_of(window=60, arl=1000, every=10_000, max_models=3)
    for number in range(8):
        list(stream.feed(outcomes(20, model=f"m{number}")))
    states = [event for event in stream.finish() if event["event"] == "state"]
    assert [state["served_model"] for state in states] == ["m0", "m1", "m2", OTHERS]
    assert [state["num_outcomes"] for state in states] == [20, 20, 20, 100]


BAD = [
    ("{", "line"),
    ("[1]", "line"),
    ('{"mu": 5, "sigma": 1}', "output_tokens"),
    ('{"mu": NaN, "sigma": 1, "output_tokens": 5}', "mu"),
    ('{"mu": 5, "sigma": 0, "output_tokens": 5}', "sigma"),
    ('{"mu": 5, "sigma": 1, "output_tokens": 0}', "record"),
    ('{"mu": 5, "sigma": 1, "output_tokens": 5, "max_tokens": 0}', "max_tokens"),
    ('{"mu": 5, "sigma": 1, "output_tokens": 5, "finished": 1}', "finished"),
    ('{"mu": %s, "sigma": 1, "output_tokens": 5}' % ("9" * 400), "mu"),
    (b"\xff\xfe", "line"),
    ("x" * 1_000_001, "line"),
    ("[" * 100_000, "line"),
]


def test_bad_lines_are_counted_and_named_and_never_fatal():
    good = '{"mu": 5, "sigma": 1, "output_tokens": 5}'
    assert (parse_outcome(good).is_finished, parse_outcome(good).prediction.nu) == (True, 3.5)
    assert not parse_outcome(good.replace("}", ', "max_tokens": 5}')).is_finished
    stream = stream_of()
    events = list(stream.feed(line for bad, _ in BAD for line in (bad, "", good)))
    assert [event["field"] for event in events] == [field for _, field in BAD]
    assert [event["line"] for event in events] == [3 * number + 1 for number in range(len(BAD))]
    end = list(stream.finish())[-1]
    assert end["num_bad_lines"] == len(BAD)
    assert end["num_outcomes"] == len(BAD)
    assert sum(end["bad_lines"].values()) == len(BAD)


def test_the_command_reads_files_and_standard_input(tmp_path, capsys, monkeypatch):
    lines = "\n".join(outcomes(50)) + "\n" + "x" * 3_000_000 + "\n"
    (tmp_path / "in.jsonl").write_text(lines)
    args = ["--window", "60", "--every", "25"]
    assert main([str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "o.jsonl"), *args]) == 0
    written = (tmp_path / "o.jsonl").read_text()
    events = [json.loads(line) for line in written.splitlines()]
    assert [event["event"] for event in events] == ["state", "state", "bad_line", "state", "end"]
    monkeypatch.setattr(sys, "stdin", type("In", (), {"buffer": BytesIO(lines.encode())}))
    assert main(["-", *args]) == 0
    assert capsys.readouterr().out == written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "1"], "window: got 1"),
        (["--arl", "5"], "arl: got 5"),
        (["nothing.jsonl"], "stream: got"),
    ],
)
def test_bad_options_are_one_line(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(options if len(options) == 1 else ["-", *options]) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_stream_that_cannot_be_read_leaves_no_output(tmp_path, monkeypatch):
    (tmp_path / "closed").touch()
    with open(tmp_path / "closed", "wb") as unreadable:
        monkeypatch.setattr(sys, "stdin", type("In", (), {"buffer": unreadable}))
        assert main(["-", "--out", str(tmp_path / "o.jsonl")]) == 2
    assert not (tmp_path / "o.jsonl").exists()

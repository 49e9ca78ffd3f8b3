"""Losses against scheduler_core.lengths, scipy, and their own definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from predictors.modules.normalization import Normalization
from scheduler_core.lengths import LogT
from scheduler_core.lengths.quantiles import LEVELS
from training.network import losses
from training.network.data import SampleLengths
from training.network.student_t import log_survival
from training.network.tasks import LengthTask, RegressionTask


def samples(rows, censored=(), max_tokens=None):
    """Samples of rows of lengths; `censored` holds the (row, column) of those that are."""
    width = max(map(len, rows))
    present = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    tokens = torch.ones(len(rows), width)
    finished = torch.ones(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row, dtype=torch.float32)
    for row, column in censored:
        finished[row, column] = False
    limits = torch.tensor(max_tokens or [float("inf")] * len(rows), dtype=torch.float32)
    return SampleLengths(tokens, finished, present, limits)


@pytest.mark.parametrize("nu", [1.0, 1.7, 3.5, 12.0, 100.0])
def test_the_tail_is_scipys_and_its_derivative_minus_the_hazard(nu):
    t = np.concatenate([-np.logspace(-5, 4, 40), [0.0], np.logspace(-5, 4, 40)])
    tail = stats.t.sf(t, nu)
    seen = tail > 1e-250
    points = torch.tensor(t, requires_grad=True)
    value = log_survival(points, torch.tensor(nu, dtype=torch.float64))
    np.testing.assert_allclose(value.detach().numpy()[seen], np.log(tail[seen]), rtol=1e-10, atol=1e-13)
    value.sum().backward()
    assert points.grad is not None
    assert torch.isfinite(points.grad).all()
    hazard = np.exp(stats.t.logpdf(t[seen], nu) - np.log(tail[seen]))
    np.testing.assert_allclose(points.grad.numpy()[seen], -hazard, rtol=1e-9)


def test_derivatives_agree_with_differences():
    t = torch.tensor([-3.0, -0.2, 0.0, 1.0, 7.0, 60.0], dtype=torch.float64, requires_grad=True)
    nu = torch.tensor([1.5, 2.0, 3.5, 3.5, 20.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_survival, (t, nu), eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("nu", [1.0, 3.5, 100.0])
def test_nll_is_the_distributions_with_cut_answers_as_tails(nu):
    mu, sigma = [5.0, 6.2, 3.0], [0.4, 1.1, 0.05]
    rows = [[120, 200, 64], [500.0], [20, 19]]
    drawn = samples(rows, censored=[(0, 1), (2, 0)])
    found = losses.log_t_nll(torch.tensor(mu), torch.tensor(sigma), torch.tensor(nu), drawn)
    for row, lengths in enumerate(rows):
        distribution = LogT(float(np.float32(mu[row])), float(np.float32(sigma[row])), nu)
        finished = drawn.finished[row, : len(lengths)].numpy()
        terms = -np.where(finished, distribution.logpdf(lengths), distribution.logsf(lengths))
        assert float(found[row]) == pytest.approx(np.mean(terms), rel=1e-5)


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 5.0])
@pytest.mark.parametrize("nu", [1.0, 3.5, 100.0])
def test_gradients_of_nll_are_finite(sigma, nu):
    lengths = [1.0, 2.0, 17.0, 300.0, 4000.0, 15_000.0]
    rows = samples([[x, x] for x in lengths], censored=[(row, 1) for row in range(len(lengths))])
    for mu in (0.0, 5.0, 9.6):
        parameters = [torch.full((6,), value, requires_grad=True) for value in (mu, sigma, nu)]
        loss = losses.log_t_nll(*parameters, rows)
        assert torch.isfinite(loss).all()
        loss.sum().backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in parameters)


def test_crps_is_the_integral_of_its_definition():
    mu, sigma, nu = 4.0, 0.6, 3.5
    for y in (20.0, 55.0, 400.0):
        found = losses.log_t_crps(torch.tensor([mu]), torch.tensor([sigma]), nu, samples([[y]]))
        z = (np.log(y) - mu) / sigma

        def squared(t, z=z):
            return (stats.t.cdf(t, nu) - (t >= z)) ** 2

        halves = [integrate.quad(squared, *ends, limit=200)[0] for ends in ((-400, z), (z, 400))]
        assert float(found) == pytest.approx(sigma * sum(halves), rel=0.02)


def test_crps_is_best_at_the_truth_also_where_answers_are_cut():
    drawn = np.exp(4.0 + 0.5 * np.random.default_rng(0).standard_t(3.5, 20_000))
    truncated = samples([np.minimum(drawn, 90.0).tolist()], max_tokens=[90.0])
    truncated = truncated._replace(finished=truncated.tokens < 90.0)
    true, *others = (
        float(losses.log_t_crps(torch.tensor([mu]), torch.tensor([sigma]), 3.5, truncated))
        for mu, sigma in ((4.0, 0.5), (4.08, 0.5), (3.92, 0.5), (4.0, 0.6), (4.0, 0.42))
    )
    assert true < min(others)


def test_the_loss_of_quantiles_is_the_pinball_loss_at_each_level():
    rows, limits = [[30, 90, 90], [7], [400.0, 12.0, 20.0]], [90.0, float("inf"), 1000.0]
    quantiles = np.sort(np.random.default_rng(0).normal(4.0, 1.0, (3, len(LEVELS))))
    drawn = samples(rows, censored=[(0, 1), (0, 2)], max_tokens=limits)
    predicted = torch.tensor(quantiles, dtype=torch.float32, requires_grad=True)
    loss = losses.pinball_loss(predicted, torch.tensor(LEVELS), drawn)
    for row, (lengths, limit) in enumerate(zip(rows, limits, strict=True)):
        of_row = [
            2 * (level if y > q else level - 1) * (y - q)
            for y in np.log(lengths)
            for level, q in zip(LEVELS, np.minimum(quantiles[row], np.log(limit)), strict=True)
        ]
        assert loss[row].item() == pytest.approx(np.mean(of_row), rel=1e-5)
    loss.sum().backward()
    # Beyond max_tokens nothing is observed, so nothing is learned.
    assert ((predicted.grad != 0) == (predicted < torch.tensor(np.log(limits)).unsqueeze(-1))).all()


def test_mse_is_of_the_z_scores_and_its_weight_rises_linearly():
    scores = torch.tensor([[1.0, 2.0, 9.0], [0.0, -1.0, 9.0]])
    batch = SimpleNamespace(fits=torch.tensor([[0.0, 0.5], [0.0, 1.0]]), weight=torch.ones(2))
    inputs = losses.LossInputs(SimpleNamespace(), batch, sigma_weight=2.0)
    loss = losses.HeadLoss(*LengthTask(objective="mse").loss(scores, inputs))
    assert loss.values.tolist() == [1.0 + 2 * 2.25, 2 * 4.0]


def test_cross_entropy_over_buckets_counts_cut_answers_as_at_least_there():
    logits = torch.tensor([[0.3, -0.2, 1.0], [0.0, 2.0, 0.5]])
    p = torch.softmax(logits, dim=-1)
    rows = samples([[9, 10, 49], [50.0]], censored=[(0, 1), (1, 0)])
    found = losses.bucket_cross_entropy(logits, torch.tensor([10.0, 50.0]), rows)
    first = -(p[0, 0].log() + (p[0, 1] + p[0, 2]).log() + p[0, 1].log()) / 3
    assert found.tolist() == pytest.approx([float(first), float(-p[1, 2].log())], rel=1e-5)


def test_the_error_of_sigma_within_is_left_out_of_the_score_of_an_epoch():
    """A prompt whose outputs are all equal has a target far from any prediction, which decided the best epoch."""
    parameters = {"mu": torch.tensor([3.0]), "sigma": torch.tensor([0.5])}
    model = SimpleNamespace(length_parameters=lambda score: parameters)
    batch = SimpleNamespace(
        samples=samples([[9, 19]]), fits=torch.tensor([[0.0, 0.0, -40.0]]), weight=torch.ones(1)
    )
    task, score = LengthTask(objective="crps", within=True), torch.zeros((1, 3))
    trained, _ = task.loss(score, losses.LossInputs(model, batch))
    chosen, _ = task.loss(score, losses.LossInputs(model, batch, auxiliary=False))
    plain, _ = LengthTask(objective="crps").loss(score, losses.LossInputs(model, batch))
    assert chosen.tolist() == plain.tolist()
    assert float(trained) > 100 * float(chosen)


def test_ordinal_cross_entropy_is_the_mean_over_the_thresholds():
    logits = torch.tensor([[2.0, 0.5, -1.0], [2.0, 0.5, -1.0]])
    p = torch.sigmoid(logits)
    found = losses.ordinal_cross_entropy(logits, torch.tensor([0, 2]))
    second = -(p[1, 0].log() + p[1, 1].log() + (1 - p[1, 2]).log()) / 3
    assert found.tolist() == pytest.approx([float(-(1 - p[0]).log().mean()), float(second)], rel=1e-5)


def test_regression_compares_z_scores_of_each_answer():
    target = (np.log1p([9, 19]) - 2.0) / 0.5
    model = SimpleNamespace(normalization=Normalization(regression_mean=2.0, regression_std=0.5))
    inputs = losses.LossInputs(model, SimpleNamespace(samples=samples([[9, 19]]), weight=torch.ones(1)))
    for objective, expected in (("l1", np.abs(1 - target).mean()), ("mse", ((1 - target) ** 2).mean())):
        loss = losses.HeadLoss(*RegressionTask(objective=objective).loss(torch.tensor([1.0]), inputs))
        assert float(loss.values) == pytest.approx(expected)


def test_light_examples_do_not_weigh_more_for_being_among_themselves():
    values = torch.tensor([1.0, 3.0, 100.0])
    light = losses.HeadLoss(values, torch.tensor([0.5, 0.5, 0.0]))
    assert float(light.mean()) == 1.0
    assert light.sums().tolist() == [4.0, 2.0]
    assert float(losses.HeadLoss(values[:0], values[:0]).mean()) == 0.0


def test_the_error_of_sigma_within_is_over_the_rows_that_have_a_fit():
    score = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    loss = losses.within_mse(score, torch.tensor([0.0, float("nan"), 4.0])).mean()
    assert loss.item() == pytest.approx(1.0)
    loss.backward()
    assert score.grad is not None
    assert score.grad.tolist() == pytest.approx([1.0, 0.0, 1.0])
    assert float(losses.within_mse(score.detach(), torch.full((3,), float("nan"))).sum()) == 0.0


def test_list_mle_is_the_plackett_luce_likelihood_of_the_order():
    score = torch.tensor([0.2, 1.5, -0.3, 0.9])
    found = losses.list_mle(score, torch.tensor([100.0, 400.0, 55.0, 230.0]), group_tokens=10)
    left, expected = [1, 3, 0, 2], 0.0
    while left:
        expected += float(torch.logsumexp(score[left], 0) - score[left[0]])
        left = left[1:]
    assert float(found.sum()) == pytest.approx(expected, rel=1e-5)
    assert float(found[2]) == pytest.approx(0.0, abs=1e-6)


def test_list_mle_does_not_order_within_a_group_or_by_place():
    score, length = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([101.0, 109.0, 30.0])
    found = losses.list_mle(score, length, group_tokens=10)
    again = losses.list_mle(score[[2, 0, 1]], length[[2, 0, 1]], group_tokens=10)
    assert again.tolist() == pytest.approx(found[[2, 0, 1]].tolist())
    everyone = float(torch.logsumexp(score, 0))
    assert found.tolist() == pytest.approx([everyone - 0.5, everyone + 1.0, 0.0], abs=1e-6)
    assert float(losses.list_mle(torch.tensor([3.0]), torch.tensor([7.0]), group_tokens=10)) == 0.0

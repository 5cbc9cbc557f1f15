"""SpeeD: both public versions against numbers computed from the schedule alone."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import kairostep as ks

PROCESSES = {
    "linear": ks.DiscreteProcess.linear(),
    "cosine": ks.DiscreteProcess.cosine(),
    "quadratic": ks.DiscreteProcess.quadratic(),
}
MEANINGFUL = {"linear": 642, "cosine": 959, "quadratic": 829}
PEAK = {"linear": 219, "cosine": 495, "quadratic": 411}
# per 100 steps, duals included (FORMULAS §3)
V1_MASS = {
    "linear": [0.153, 0.154, 0.154, 0.148, 0.140, 0.140, 0.067, 0.014, 0.014, 0.014],
    "cosine": [0.107, *[0.1035] * 8, 0.066],
    "quadratic": [0.126, 0.124, *[0.116] * 6, 0.042, 0.012],
}


def asymmetric_mass(name, version):
    """Return p (1000,) before duals, in numpy."""
    if version == "paper":
        return np.where(np.arange(1000) < 700, 5, 1) / (1000 + 700 * (5 - 1))
    slope = np.gradient(np.sqrt(1 - PROCESSES[name].alphas_cumprod.numpy()))
    mass = np.tanh(1e6 * (slope - 1e-4)) + 1.5
    return mass / mass.sum()


def mass_with_duals(name, version):
    """Return where draws go (1000,): half by p, half mirrored at M."""
    mass = asymmetric_mass(name, version)
    total = mass.copy()
    for step, share in enumerate(mass):
        total[MEANINGFUL[name] - step if step < MEANINGFUL[name] else step - MEANINGFUL[name]] += share
    return total / 2


def weight_curve(name, version):
    """Return the loss weight of each step (1000,), in numpy."""
    noise = 1 - PROCESSES[name].alphas_cumprod.numpy()
    if version == "v1":
        return noise
    change = np.gradient(noise)
    relative = (change - change.min()) / (change.max() - change.min())
    return np.where(np.arange(1000) < 700, 0.4 + 0.2 * relative, 1.0)


def steps_and_weights(name, version):
    """Return steps and weights of so many draws that every step is among them."""
    drawn = ks.Speed(PROCESSES[name], version=version).sample(torch.zeros(200_000, 1))
    steps = drawn.index(1000)
    assert (torch.bincount(steps, minlength=1000) > 0).all()
    return steps, drawn.weight


@pytest.mark.parametrize("version", ["v1", "paper"])
@pytest.mark.parametrize("name", PROCESSES)
def test_number_of_meaningful_steps(name, version):
    assert ks.Speed(PROCESSES[name], version=version).num_meaningful_steps == MEANINGFUL[name]


@pytest.mark.parametrize("name", PROCESSES)
def test_v1_mass_per_100_steps_has_the_printed_digits(name):
    density = ks.Speed(PROCESSES[name], version="v1").density(10)
    assert_close(density.double(), torch.tensor(V1_MASS[name], dtype=torch.float64), rtol=0, atol=5.5e-4)


@pytest.mark.parametrize("version", ["v1", "paper"])
@pytest.mark.parametrize("name", PROCESSES)
def test_density_is_the_asymmetric_one_and_its_mirror(name, version):
    sampler = ks.Speed(PROCESSES[name], version=version)
    assert_close(sampler.mass.double(), torch.from_numpy(asymmetric_mass(name, version)), rtol=1e-5, atol=0)
    assert_close(sampler.density(1000).double(), torch.from_numpy(mass_with_duals(name, version)), rtol=0, atol=2e-6)
    assert_close(sampler.density().sum(), torch.tensor(1.0))


def test_paper_version_is_the_default():
    assert_close(ks.Speed(PROCESSES["linear"]).mass[[0, 699, 700, 999]] * 3800, torch.tensor([5.0, 5.0, 1.0, 1.0]))


@pytest.mark.parametrize("version", ["v1", "paper"])
@pytest.mark.parametrize("name", PROCESSES)
def test_weight_of_each_draw_is_that_of_its_step(name, version):
    steps, weight = steps_and_weights(name, version)
    assert_close(weight, torch.from_numpy(weight_curve(name, version)).float()[steps], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROCESSES)
def test_paper_weight_peaks_where_noise_grows_fastest_and_is_1_from_step_700_on(name):
    steps, weight = steps_and_weights(name, "paper")
    before = steps < 700
    assert_close(weight[~before], torch.ones_like(weight[~before]))
    assert weight[before].min() >= 0.4 - 1e-6
    assert_close(weight[before].max(), torch.tensor(0.6))
    assert int(steps[before][weight[before].argmax()]) == PEAK[name]


@pytest.mark.parametrize("version", ["v1", "paper"])
@pytest.mark.parametrize("name", PROCESSES)
def test_draws_follow_the_density(name, version):
    steps, _ = steps_and_weights(name, version)
    share = torch.bincount(steps // 20, minlength=50).double() / len(steps)
    expected = torch.from_numpy(mass_with_duals(name, version)).view(50, 20).sum(1)
    assert_close(share, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("stratified", [True, False])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_rows_of_small_batches_follow_the_density_too(num_rows, stratified):
    sampler = ks.Speed(PROCESSES["linear"], version="v1", stratified=stratified)
    draws = [sampler.sample(torch.zeros(num_rows, 2)) for _ in range(3000)]
    assert all(drawn.t.shape == drawn.weight.shape == (num_rows,) for drawn in draws)
    expected = torch.from_numpy(mass_with_duals("linear", "v1")).view(10, 100).sum(1)
    for row in {0, num_rows - 1}:
        steps = torch.stack([drawn.index(1000)[row] for drawn in draws])
        share = torch.bincount(steps // 100, minlength=10).double() / len(draws)
        assert_close(share, expected, rtol=0, atol=0.03)  # 4 standard deviations


def test_batch_consists_of_mirrored_pairs():
    steps = ks.Speed(PROCESSES["linear"], version="v1").sample(torch.zeros(64, 1)).index(1000)
    first, second = steps[:32], steps[32:]
    sums_to_m, differs_by_m = first + second == 642, (first - second).abs() == 642
    assert (sums_to_m | differs_by_m).all()


def test_float64_batch_gets_float64_times_and_weights():
    drawn = ks.Speed(PROCESSES["cosine"]).sample(torch.zeros(4096, 1, dtype=torch.float64))
    assert drawn.t.dtype == drawn.weight.dtype == torch.float64
    expected = torch.from_numpy(weight_curve("cosine", "paper"))[drawn.index(1000)]
    assert_close(drawn.weight, expected, rtol=1e-5, atol=1e-6)


def test_unknown_version_raises_and_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"(?s)(?=.*paper)(?=.*v1)(?=.*v3)"):
        ks.Speed(PROCESSES["linear"], version="v3")


def test_a_slow_start_is_no_convergence() -> None:
    """EDM's sigma rises from 0.002: its first steps change x_t as little as its last."""
    speed = ks.Speed(ks.EDMProcess())
    assert 700 < speed.num_meaningful_steps < 900


def linear_of(num_steps):
    """Return one schedule in any number of steps: the linear one of 1000 with its rate per unit of t."""
    return ks.DiscreteProcess.from_betas(torch.linspace(0.1, 20, num_steps, dtype=torch.float64) / num_steps)


@pytest.mark.parametrize("num_steps", [50, 100, 250, 4000])
def test_the_share_of_meaningful_steps_does_not_depend_on_their_number(num_steps):
    for process, published in ((linear_of(num_steps), 0.642), (ks.DiscreteProcess.cosine(num_steps), 0.959)):
        share = ks.Speed(process).num_meaningful_steps / num_steps
        assert share == pytest.approx(published, abs=max(1.5 / num_steps, 1e-3))


@pytest.mark.parametrize("num_steps", [100, 4000])
def test_v1_draws_alike_whatever_the_number_of_steps(num_steps):
    expected = ks.Speed(linear_of(1000), "v1").density(10)
    assert_close(ks.Speed(linear_of(num_steps), "v1").density(10), expected, rtol=0, atol=max(2 / num_steps, 2e-3))


def test_k_tau_and_lambda_are_options_of_the_paper_version():
    sampler = ks.Speed(PROCESSES["linear"], k=2.0, tau=0.25, lam=0.8)
    assert_close(sampler.mass[[0, 249, 250, 999]] * 1250, torch.tensor([2.0, 2.0, 1.0, 1.0]))
    noise = 1 - PROCESSES["linear"].alphas_cumprod
    (change,) = torch.gradient(noise)
    relative = (change - change.min()) / (change.max() - change.min())
    assert_close(sampler.step_weight[:250].double(), (0.2 + 0.6 * relative)[:250], rtol=1e-5, atol=1e-6)
    assert_close(sampler.step_weight[250:], torch.ones(750))


def test_k_is_the_ratio_of_v1_too():
    mass = ks.Speed(PROCESSES["linear"], "v1", k=3.0).mass
    assert_close(mass[0] / mass[-1], torch.tensor(3.0))
    flat = ks.Speed(PROCESSES["linear"], "v1", k=1.0).mass
    assert_close(flat, torch.full((1000,), 1e-3))


@pytest.mark.parametrize("version", ["v1", "paper"])
def test_without_mirrors_every_draw_follows_the_asymmetric_density(version):
    sampler = ks.Speed(PROCESSES["linear"], version, mirrored=False)
    expected = torch.from_numpy(asymmetric_mass("linear", version)).view(10, 100).sum(1)
    assert_close(sampler.density(10).double(), expected, rtol=0, atol=1e-6)
    steps = sampler.sample(torch.zeros(10_000, 1)).index(1000)
    assert_close(torch.bincount(steps // 100, minlength=10) / 1e4, expected.float(), rtol=0, atol=3e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0.0}, "k must be a finite number above 0, got 0.0"),
        ({"tau": 700}, r"tau must be a share in \[0, 1\], got 700"),
        ({"lam": 5}, r"lam must be a share in \[0, 1\], got 5"),
        ({"version": "v1", "lam": 0.8}, 'tau and lam belong to version="paper", got 0.7 and 0.8'),
    ],
)
def test_wrong_options_are_refused_with_rule_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        ks.Speed(PROCESSES["linear"], **options)


def test_a_process_of_two_steps_has_a_weight() -> None:
    drawn = ks.Speed(ks.DiscreteProcess.linear(2)).sample(torch.zeros(64, 1))
    assert bool((drawn.weight.isfinite() & (drawn.weight > 0)).all())

"""Fixed samplers: densities and draws against scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats
from torch.testing import assert_close

import kairostep as ks

EDGES = np.linspace(0, 1, 101)


def mode_cdf(t, scale=1.29):
    """Return the share of t = 1 - u - scale (cos(pi u / 2)^2 - 1 + u), u uniform, that lies below t."""

    def solve(level):
        def excess(u):
            return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u) - level

        return optimize.brentq(excess, -1e-12, 1 + 1e-12, xtol=1e-14)

    return 1 - np.vectorize(solve)(t)


def logit_normal_cdf(t, mean=0.0, std=1.0):
    """Return the share of sigmoid(N(mean, std^2)) below t."""
    return stats.norm(mean, std).cdf(special.logit(t))


# sampler, with options -> its CDF over t
CONTINUOUS = {
    "uniform": (ks.Uniform, lambda t: t),
    "logit_normal": (ks.LogitNormal, logit_normal_cdf),
    "logit_normal(-1,0.5)": (
        lambda **options: ks.LogitNormal(-1.0, 0.5, **options),
        lambda t: logit_normal_cdf(t, -1.0, 0.5),
    ),
    "logit_normal(0.5,3)": (
        lambda **options: ks.LogitNormal(mean=0.5, std=3.0, **options),
        lambda t: logit_normal_cdf(t, 0.5, 3.0),
    ),
    **{
        f"beta({a},{b})": (lambda a=a, b=b, **options: ks.FixedBeta(a, b, **options), stats.beta(a, b).cdf)
        for a, b in [(2.0, 3.0), (1.0, 1.0), (0.3, 0.5), (0.05, 4.0), (40.0, 2.0), (800.0, 1200.0)]
    },
    "mode": (ks.Mode, mode_cdf),
    "mode(-0.8)": (lambda **options: ks.Mode(-0.8, **options), lambda t: mode_cdf(t, -0.8)),
    "mode(0)": (lambda **options: ks.Mode(0.0, **options), lambda t: t),
}
DISCRETE = {
    "linear": ks.DiscreteProcess.linear(),
    "cosine": ks.DiscreteProcess.cosine(100),
    "zero terminal SNR": ks.DiscreteProcess.scaled_linear().with_zero_terminal_snr(),
}
# sampler of a process -> the share of draws with less than this log-SNR
LOG_SNR_SAMPLERS = {
    "log_normal": (ks.LogNormalSigma, lambda log_snr: stats.norm(-1.2, 1.2).sf(-log_snr / 2)),
    "log_normal(-0.4,1)": (
        lambda process: ks.LogNormalSigma(process, mean=-0.4, std=1.0),
        lambda log_snr: stats.norm(-0.4, 1.0).sf(-log_snr / 2),
    ),
    "log_normal(-5,2)": (
        lambda process: ks.LogNormalSigma(process, mean=-5.0, std=2.0),
        lambda log_snr: stats.norm(-5.0, 2.0).sf(-log_snr / 2),
    ),
    "laplace": (ks.Laplace, stats.laplace(0.0, 0.5).cdf),
    "laplace(1,3)": (lambda process: ks.Laplace(process, mean=1.0, scale=3.0), stats.laplace(1.0, 3.0).cdf),
}


def test_logit_normal_has_the_printed_decile_masses():
    half = [0.014, 0.069, 0.116, 0.144, 0.157]
    assert_close(ks.LogitNormal().density(10), torch.tensor(half + half[::-1]), rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", CONTINUOUS)
def test_density_agrees_with_scipy(name):
    make, cdf = CONTINUOUS[name]
    density = make().density()
    assert density.shape == (100,)
    assert_close(density.double(), torch.from_numpy(np.diff(cdf(EDGES))), rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_bins", [1, 7, 1000])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_density_sums_to_1_in_any_number_of_bins(name, num_bins):
    density = CONTINUOUS[name][0]().density(num_bins)
    assert density.shape == (num_bins,)
    assert (density >= 0).all()
    assert_close(density.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("process", DISCRETE.values(), ids=DISCRETE)
@pytest.mark.parametrize("name", LOG_SNR_SAMPLERS)
def test_density_over_a_discrete_process_gives_each_step_what_is_nearest_in_log_snr(name, process):
    make, below = LOG_SNR_SAMPLERS[name]
    alpha_bar = process.alphas_cumprod.numpy()
    with np.errstate(divide="ignore"):
        log_snr = np.log(alpha_bar) - np.log1p(-alpha_bar)
    between = (log_snr[1:] + log_snr[:-1]) / 2
    if log_snr[-1] == -np.inf:  # the last step has no halfway: it begins as far out as its neighbour reaches inward
        between[-1] = 1.5 * log_snr[-2] - 0.5 * log_snr[-3]
    edges = np.concatenate([[np.inf], between, [-np.inf]])
    density = make(process).density(process.num_steps)
    assert_close(density.double(), torch.from_numpy(-np.diff(below(edges))), rtol=0, atol=2e-6)


class InfiniteEnds:
    """Four steps, the first without noise and the last without data."""

    num_steps = 4

    def log_snr(self, t):
        """Return four numbers, two of them infinite."""
        return torch.tensor([torch.inf, 1.0, -1.0, -torch.inf], dtype=t.dtype)[(4 * t).long()]


@pytest.mark.parametrize("name", ["log_normal(-0.4,1)", "laplace(1,3)"])
def test_tails_belong_to_the_steps_at_infinite_log_snr(name):
    make, below = LOG_SNR_SAMPLERS[name]
    expected = -np.diff(below(np.array([np.inf, 2.0, 0.0, -2.0, -np.inf])))
    assert_close(make(InfiniteEnds()).density(4).double(), torch.from_numpy(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [ks.LogNormalSigma, ks.Laplace])
def test_the_last_step_of_a_zero_terminal_snr_is_drawn(make):
    process = ks.DiscreteProcess.linear(8, 0.05, 0.6).with_zero_terminal_snr()
    options = {"mean": 2.0} if make is ks.LogNormalSigma else {"mean": -4.0}
    drawn = make(process, **options).sample(torch.zeros(1000, 1)).index(8)
    assert (drawn == 7).any()


def test_a_process_without_any_finite_step_is_refused():
    class Nothing(InfiniteEnds):
        def log_snr(self, t):
            return torch.full_like(t, torch.inf)

    with pytest.raises(ValueError, match="finite at one step at least"):
        ks.Laplace(Nothing())


@pytest.mark.parametrize("process", [ks.EDMProcess(), ks.EDMProcess(0.5, 0.02, 3.0), ks.FlowProcess()])
@pytest.mark.parametrize("name", LOG_SNR_SAMPLERS)
def test_density_over_a_continuous_process_is_that_of_its_log_snr(name, process):
    make, below = LOG_SNR_SAMPLERS[name]
    inner = process.log_snr(torch.from_numpy(EDGES[1:-1])).numpy()
    edges = np.concatenate([[np.inf], inner, [-np.inf]])  # what lies outside goes to the nearest t
    assert_close(make(process).density().double(), torch.from_numpy(-np.diff(below(edges))), rtol=0, atol=3e-6)


def test_mass_near_the_clean_end_of_the_flow_is_that_of_its_log_snr():
    t = np.arange(21) / 4000
    with np.errstate(divide="ignore"):
        expected = np.diff(stats.norm(-7.0, 1.0).cdf(special.logit(t)))  # log(sigma / alpha) = logit(t)
    density = ks.LogNormalSigma(ks.FlowProcess(), mean=-7.0, std=1.0).density(4000)[:20]
    assert_close(density.double(), torch.from_numpy(expected), rtol=0, atol=1e-3)


def test_tabulated_reproduces_its_mass():
    mass = torch.tensor([1.0, 0.0, 3.0, 4.0])
    sampler = ks.Tabulated(mass)
    assert_close(sampler.density(4), mass / 8)
    assert_close(sampler.density(8), mass.repeat_interleave(2) / 16)
    assert_close(sampler.density(2), torch.tensor([0.125, 0.875]))
    drawn = sampler.sample(torch.zeros(8000, 1))
    assert_close(torch.bincount(drawn.index(4), minlength=4), torch.tensor([1000, 0, 3000, 4000]))
    assert_close(drawn.weight, torch.ones(8000))


@pytest.mark.parametrize("name", CONTINUOUS)
def test_independent_draws_pass_a_kolmogorov_smirnov_test(name):
    make, cdf = CONTINUOUS[name]
    t = make(stratified=False, seed=1).sample(torch.zeros(10_000, 1, dtype=torch.float64)).t.numpy()
    if name in ("beta(0.3,0.5)", "beta(0.05,4.0)"):  # much of their mass lies in the outermost of the sampler's bins
        grid = np.arange(1, 1000) / 1000
        assert np.abs((t[:, None] < grid).mean(0) - cdf(grid)).max() < 1.95 / math.sqrt(len(t))
    else:
        assert stats.kstest(t, cdf).pvalue > 1e-3


@pytest.mark.parametrize("process", [ks.EDMProcess(), ks.FlowProcess()])
@pytest.mark.parametrize("name", LOG_SNR_SAMPLERS)
def test_log_snr_of_draws_has_the_stated_distribution(name, process):
    make, below = LOG_SNR_SAMPLERS[name]
    log_snr = process.log_snr(make(process).sample(torch.zeros(2000, 1, dtype=torch.float64)).t)
    levels = process.log_snr(torch.from_numpy(EDGES[1:-1]))
    share = (log_snr[:, None] < levels).double().mean(0)
    assert_close(share, torch.from_numpy(below(levels.numpy())), rtol=0, atol=1.1 / 2000)  # stratified: one draw off


@pytest.mark.parametrize("num_rows", [1, 5, 64, 1000])
@pytest.mark.parametrize("name", ["uniform", "logit_normal", "beta(2.0,3.0)", "mode"])
def test_stratified_batches_have_one_draw_in_each_stratum_in_random_order(name, num_rows):
    make, cdf = CONTINUOUS[name]
    sampler = make()
    orders = []
    for _ in range(5):
        t = sampler.sample(torch.zeros(num_rows, 2, dtype=torch.float64)).t
        quantile = cdf(t.numpy()) * num_rows
        place = np.sort(quantile) - np.arange(num_rows)  # within its stratum
        assert place.min() > -1e-3
        assert place.max() < 1 + 1e-3
        orders.append(tuple(quantile.argsort()))
    if num_rows >= 64:
        assert len(set(orders)) == 5
        assert all(abs(stats.spearmanr(order, range(num_rows)).statistic) < 0.6 for order in orders)


def test_place_in_the_batch_says_nothing_about_the_time():
    sampler = ks.Uniform()
    t = torch.stack([sampler.sample(torch.zeros(8, 1)).t for _ in range(4000)])
    assert_close(t.mean(0), torch.full((8,), 0.5), rtol=0, atol=0.02)  # 4 standard deviations
    assert_close(t.std(0), torch.full((8,), 12**-0.5), rtol=0, atol=0.01)


def test_independent_draws_are_not_stratified():
    t = ks.Uniform(stratified=False).sample(torch.zeros(1000, 1)).t
    assert len(np.unique(np.floor(t.numpy() * 1000))) < 700  # 632 expected


@pytest.mark.parametrize("name", CONTINUOUS)
def test_weights_are_1_unless_unbiased(name):
    drawn = CONTINUOUS[name][0]().sample(torch.zeros(32, 3))
    assert_close(drawn.weight, torch.ones(32))
    assert ((drawn.t >= 0) & (drawn.t <= 1)).all()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_unbiased_weights_are_bounded_and_inverse_to_the_density(name):
    make, cdf = CONTINUOUS[name]
    sampler = make(unbiased=True)
    drawn = sampler.sample(torch.zeros(20_000, 1, dtype=torch.float64))
    assert drawn.weight.max() <= 10 + 1e-5
    fine = np.linspace(0, 1, 4001)
    mass = torch.from_numpy(0.9 * np.diff(cdf(fine)) + 0.1 / 4000)  # a tenth of all draws is uniform
    assert_close(drawn.weight, 1 / (4000 * mass[drawn.index(4000)]), rtol=1e-3, atol=0)
    assert_close(sampler.density().double(), mass.view(100, 40).sum(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in CONTINUOUS if name not in ("beta(800.0,1200.0)", "beta(0.05,4.0)")])
def test_unbiased_draws_estimate_uniform_means(name):
    drawn = CONTINUOUS[name][0](unbiased=True).sample(torch.zeros(50_000, 1, dtype=torch.float64))
    for function, mean in ((torch.ones_like, 1.0), (torch.sin, 1 - math.cos(1)), (torch.exp, math.e - 1)):
        estimate = (drawn.weight * function(drawn.t)).mean()
        assert_close(estimate, torch.tensor(mean, dtype=torch.float64), rtol=0, atol=5e-3)


def test_draws_are_a_function_of_the_seed():
    x0 = torch.zeros(16, 1)
    first, same, other = (ks.LogitNormal(seed=seed).sample(x0).t for seed in (5, 5, 6))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_continued_sampler_goes_on_where_it_stood():
    sampler, resumed = ks.LogitNormal(seed=5), ks.LogitNormal(seed=0)
    x0 = torch.zeros(16, 1)
    sampler.sample(x0)
    resumed.load_state_dict(sampler.state_dict())
    assert torch.equal(sampler.sample(x0).t, resumed.sample(x0).t)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ks.LogitNormal(std=0.0), ["std", "0.0"]),
        (lambda: ks.LogitNormal(std=-1.5), ["std", "-1.5"]),
        (lambda: ks.LogitNormal(mean=math.nan), ["mean", "nan"]),
        (lambda: ks.Mode(5.0), ["scale", "5.0"]),
        (lambda: ks.Mode(-1.5), ["scale", "-1.5"]),
        (lambda: ks.Mode(math.nan), ["scale", "nan"]),
        (lambda: ks.FixedBeta(-0.5, 1.0), ["a", "-0.5"]),
        (lambda: ks.FixedBeta(1.0, 0.0), ["b", "0.0"]),
        (lambda: ks.FixedBeta(1.0, math.inf), ["b", "inf"]),
        (lambda: ks.LogNormalSigma(ks.FlowProcess(), std=-2.5), ["std", "-2.5"]),
        (lambda: ks.LogNormalSigma(ks.FlowProcess(), mean=math.inf), ["mean", "inf"]),
        (lambda: ks.Laplace(ks.FlowProcess(), scale=0.0), ["scale", "0.0"]),
        (lambda: ks.Laplace(ks.FlowProcess(), mean=math.nan), ["mean", "nan"]),
        (lambda: ks.Tabulated(torch.tensor([1.0, -2.0])), ["mass", "-2.0"]),
        (lambda: ks.Tabulated(torch.zeros(3)), ["mass", "0"]),
        (lambda: ks.Tabulated(torch.tensor([])), ["mass", "(0,)"]),
        (lambda: ks.Tabulated(torch.tensor([1.0, math.inf])), ["mass", "inf"]),
        (lambda: ks.Tabulated(torch.tensor([1.0, math.nan])), ["mass", "nan"]),
        (lambda: ks.Tabulated(torch.ones(2, 3)), ["mass", "(2, 3)"]),
        (lambda: ks.Uniform(seed=-3), ["seed", "-3"]),
    ],
    ids=lambda part: "" if callable(part) else " ".join(part),
)
def test_bad_arguments_raise_and_name_the_value(make, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (each case names its own words)
        make()
    for words in named:
        assert words in str(caught.value)

"""Turns results into panels of curves, for a picture or a page."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kairostep.analysis.gradient_profile import VarianceProfile
from kairostep.analysis.increments import ProcessIncrements
from kairostep.analysis.interdependence import Interdependence
from kairostep.analysis.preview import Preview
from kairostep.analysis.step_noise import METRICS, GradientNoise
from kairostep.plots import Axis, Curve, Panel

MAX_POINTS = 5000  # of a curve over the steps of a process


def preview_panels(seen: Preview) -> list[Panel]:
    """Return density, weight and product over t and over log-SNR, each relative to its peak."""
    curves = {"density of draws": seen.density, "weight": seen.weight, "product": seen.density * seen.weight}
    over_log_snr = {
        "density of draws": seen.per_log_snr(seen.density),
        "weight": seen.weight,
        "product": seen.per_log_snr(seen.density * seen.weight),
    }
    return [
        Panel(Axis("t, 0 is clean data"), Axis("relative to the peak"), _relative(seen.t, curves), title="over t"),
        Panel(
            Axis("log-SNR, densities per unit of it"),
            Axis("relative to the peak"),
            _relative(seen.log_snr.flip(0), {name: values.flip(0) for name, values in over_log_snr.items()}),
            title="over log-SNR",
        ),
    ]


def _relative(x: Tensor, curves: Mapping[str, Tensor]) -> list[Curve]:
    return [Curve(name, x.tolist(), (values / values.max()).tolist()) for name, values in curves.items()]


def increments_panels(increments: ProcessIncrements) -> list[Panel]:
    """Return the noise and its slope with the boundaries of the areas, and the moments of the increments."""
    t, between = increments.t, (increments.t[1:] + increments.t[:-1]) / 2
    marks = tuple((area.start / increments.num_steps, area.name) for area in increments.areas if area.end > area.start)
    slope = increments.sigma.square().diff()
    sizes = {"squared mean / x0": increments.mean.square(), "variance along a path": increments.chain_variance}
    every = -(-len(t) // MAX_POINTS)  # of a process with millions of steps a picture shows some
    places = between[::every].tolist()
    noise = [
        Curve("sigma", t[::every].tolist(), increments.sigma[::every].tolist()),
        Curve("rise of sigma squared, relative to its peak", places, (slope / slope.max())[::every].tolist()),
        Curve("variance of x(t+1) - x(t), halved", places, (increments.variance / 2)[::every].tolist()),
    ]
    shown = _relative(between[::every], {name: values[::every] for name, values in sizes.items()})
    return [
        Panel(Axis("t"), Axis("see the legend"), noise, title="the process and its areas", marks=marks),
        Panel(Axis("t"), Axis("relative to the peak"), shown, title="increments", marks=marks),
    ]


def variance_panels(profiles: Mapping[int, VarianceProfile]) -> list[Panel]:
    """Return the variance of both losses and L_simple itself over t, one curve for each checkpoint."""

    def curves(key: str) -> Sequence[Curve]:
        return [
            Curve(f"step {step}", [at.t for at in profile.at], [getattr(at, key).value for at in profile.at])
            for step, profile in profiles.items()
        ]

    return [
        Panel(
            Axis("t"),
            Axis("trace of the covariance", log=True),
            curves("variance"),
            title="gradient variance, L_simple",
        ),
        Panel(
            Axis("t"),
            Axis("trace of the covariance", log=True),
            curves("vlb_variance"),
            title="gradient variance, L_VLB",
        ),
        Panel(Axis("t"), Axis("squared error", log=True), curves("loss"), title="loss, L_simple"),
    ]


def interdependence_panels(effects: Interdependence) -> list[Panel]:
    """Return the change of the loss over t for each range that was trained on."""
    num_parts = len(effects.before)
    t = [(part + 0.5) / num_parts for part in range(num_parts)]
    absolute, relative = [], []
    for effect in effects.effects:
        name, values = f"trained on {effect.start:.2f}..{effect.end:.2f}", [change.value for change in effect.change]
        absolute.append(Curve(name, t, values))
        shares = [100 * value / before.value for value, before in zip(values, effects.before, strict=True)]
        relative.append(Curve(name, t, shares))
    return [
        Panel(Axis("t"), Axis("after minus before"), absolute, title="change of the held-out loss"),
        Panel(Axis("t"), Axis("% of the loss before"), relative, title="relative change"),
    ]


def noise_panels(noise: GradientNoise, densities: Mapping[str, Tensor]) -> list[Panel]:
    """Return the squared size of single gradients over t in each metric beside the loss, and the densities."""
    num_bins = len(noise.losses)
    t = [(k + 0.5) / num_bins for k in range(num_bins)]
    sizes = {f"|g|^2, {metric}": noise.moments(metric) for metric in METRICS} | {"loss": noise.losses.mean(1)}
    curves = [Curve(name, t, (values / values.mean()).tolist()) for name, values in sizes.items()]
    drawn = [Curve(name, t, (values / values.mean()).tolist()) for name, values in densities.items()]
    return [
        Panel(Axis("t"), Axis("relative to the mean", log=True), curves, title="single-row gradients"),
        Panel(Axis("t"), Axis("density over uniform's"), drawn, title="where draws go"),
    ]

"""`kairostep preview` and `kairostep analyse increments`: what needs neither training nor data."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from kairostep.analysis import process_increments
from kairostep.analysis.panels import increments_panels, preview_panels
from kairostep.analysis.stand_ins import parts_without_data
from kairostep.analysis.table import increments_table, preview_table
from kairostep.commands.output import check_output, write_in_run, write_output
from kairostep.commands.subject import subject_of
from kairostep.experiments.experiment import make_objective


def show_preview(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show density, weight and product."""
    check_output(known.output)
    subject = subject_of(settings)
    parts = parts_without_data(subject.config)
    seen, config = parts.preview(), parts.config
    table, predicted = preview_table(seen, known.parts), config.prediction
    title = f"sampler {config.sampler.name}, weighting {config.weighting.name}, process {config.process.name}"
    print(f"{title}, prediction {predicted}")
    print(f"weight: on the squared error of {predicted}; product: draws x weight, what is optimised;")
    print("on eps, on x0: the same objective, as shares of its weight on the error of the noise and of x0\n")
    print(table)
    if seen.learns:
        note = f"sampler {config.sampler.name} changes its density in training: this is how it starts"
        print(f"kairostep: note: {note}", file=sys.stderr)
    write_output(
        known.output,
        "preview",
        replace(subject, config=config).facts(known.typed, torch.device("cpu")),
        {"over_t": seen.over_t(known.parts), "over_log_snr": seen.over_log_snr(known.parts), "curves": seen},
        title=f"{title}, {predicted}",
        how_to_read=f"What is optimised is the product of the density of draws and the weight on {predicted}.",
        panels=preview_panels(seen),
    )


def show_increments(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Show SpeeD's areas."""
    check_output(known.output)
    subject = subject_of(settings)
    config, objective = make_objective(subject.config)
    increments = process_increments(objective.process)
    share = 1 - increments.speed_convergence_start / increments.num_steps
    print(f"process {config.process.name}, {increments.num_steps} steps: x(t+1) - x(t) given x0\n")
    print(increments_table(increments))
    print(f"\nconvergence in SpeeD's released sampler: the last {100 * share:.0f} % of steps, whatever the schedule")
    facts = replace(subject, config=config).facts(known.typed, torch.device("cpu"))
    if subject.directory is not None:
        write_in_run(subject.directory, "increments", facts, increments)
    write_output(
        known.output,
        "increments",
        facts,
        increments,
        title=f"process increments, {config.process.name}",
        how_to_read="A process accelerates until its noise grows fastest, and has converged where sigma hardly rises.",
        panels=increments_panels(increments),
    )

"""Measurements as lines and as a table."""

import math

import pytest

from kairostep.evaluation import Estimate
from kairostep.evaluation.measurement import Measurement, rounded, table


def test_a_line_has_its_own_facts_before_common_ones_and_null_for_what_is_not_finite() -> None:
    measurement = Measurement("fid", Estimate(3.5, math.nan), 10, {"solver": "heun"})
    assert measurement.line({"checkpoint": 7, "solver": None}) == {
        "what": "fid", "value": 3.5, "standard_error": None, "n": 10, "checkpoint": 7, "solver": "heun",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (3.14159, 0.0271, "3.142 ± 0.027"),
        (123.456, 4.56, "123.5 ± 4.6"),
        (1234.5, 45.6, "1234 ± 46"),
        (0.00012345, 0.0000012, "0.0001234 ± 0.0000012"),
        (1.0, 0.0, "1.000000 ± 0.000000"),
        (4.2e-12, 3.1e-13, "4.20e-12 ± 3.1e-13"),
        (3.14159265, math.nan, "3.14159 ± ?"),
    ],
)
def test_values_have_the_digits_that_their_errors_allow(value: float, error: float, text: str) -> None:
    assert rounded(Estimate(value, error)) == text


def test_the_table_has_a_line_per_measurement() -> None:
    measurements = [
        Measurement("fid", Estimate(3.5, 0.1), 10),
        Measurement("loss", Estimate(0.25, 0.01), 5, {"t": [0.0, 0.05]}),
    ]
    assert table(measurements).splitlines() == [
        "fid                  3.50 ± 0.10  n = 10",
        "loss t 0.00..0.05  0.250 ± 0.010  n = 5",
    ]
    assert table([]) == ""

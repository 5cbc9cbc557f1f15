"""Comparisons: trains arms with the same seeds and returns ratios to a baseline, with intervals and a verdict."""

"""Arms x seeds x learning rates, trained in pairs, to ratios with intervals and a verdict."""

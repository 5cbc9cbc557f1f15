"""`python -m kairostep`, and what `accelerate launch -m kairostep` runs."""

from kairostep.cli import main

main()

"""`python -m kairostep`, which `accelerate launch -m kairostep` also runs."""

from kairostep.cli import main

main()

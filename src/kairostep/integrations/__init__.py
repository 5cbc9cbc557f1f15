"""Samplers in other people's training code: one thin file per library, imported only by those who use it."""

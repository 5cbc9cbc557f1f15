"""Seeds that are functions of counters: nothing to save, nothing to replay."""

_MASK = 2**64 - 1


def mixed_seed(*counters: int) -> int:
    """Return 64 well-mixed bits that depend on every counter and on their order, in [0, 2**64).

    Each counter goes through the finaliser of SplitMix64 (Steele et al. 2014), on top of what came before.
    """
    state = 0
    for counter in counters:
        state = (state + counter + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state

"""Errors that are nobody's mistake in the code, in the words of a command."""

from kairostep.ranks import is_lost_rank, rank, world_size

NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")  # of a CPU, a GPU, and of both


def words_for(error: BaseException) -> str | None:
    """Return what to tell of an error, None if only its traceback helps."""
    if is_lost_rank(error):
        return (
            f"process {rank()} of {world_size()} stops, since another has ended or cannot be reached: "
            "the output of that one says why; the same command goes on where it was"
        )
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        reason = str(error).splitlines()[0] if str(error) else "of Python"
        return f"memory ran out ({reason}): lower --batch_size, raise --accumulate, or take a smaller network"
    return None

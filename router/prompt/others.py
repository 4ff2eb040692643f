"""Turns of other threads. Not to be compiled."""


def give_way() -> None:
    """Let other threads have their turn, if they wait for it. Compiled code never does so by itself; a call of a
    function of Python's does."""

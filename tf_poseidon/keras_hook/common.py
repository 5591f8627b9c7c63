"""What several hooks ask."""


def is_ours(strategy):
    """Whether a strategy is a PoseidonStrategy in a job of several processes."""
    # By what it can do, since strategy.py imports the hooks.
    return getattr(strategy.extended, "communicator", None) is not None

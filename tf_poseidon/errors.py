"""The exceptions that tf_poseidon raises: all of them are `PoseidonError`s."""


class PoseidonError(Exception):
    """Something that the user can mend; the text names subject, value, expected and remedy.

    Derived from Exception itself: only of such classes does AutoGraph keep the type when it adds the
    place in the user's code.
    """


class ConfigurationError(PoseidonError):
    """An option, an argument, or what is installed."""


class PlanError(PoseidonError):
    """A plan that is damaged, or was made for something else."""


class GraphError(PoseidonError):
    """A model, program or graph that cannot be trained on several ranks as it is."""


class JobError(PoseidonError):
    """Ranks that cannot join their job, or cannot go on with it."""


class JobEndedError(JobError):
    """The job was ended: by a failure of this or another rank, or by a rank that left early."""

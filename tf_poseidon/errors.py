"""The exceptions that tf_poseidon raises."""


class PoseidonError(RuntimeError):
    """Something that the user can mend; the text names subject, value, expected and remedy."""


class JobEndedError(PoseidonError):
    """The job was ended: by a failure of this or another rank, or by a rank that left early."""

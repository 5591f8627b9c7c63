"""The exceptions that tf_poseidon raises."""


class PoseidonError(Exception):
    """Something that the user can mend; the text names subject, value, expected and remedy.

    Derived from Exception itself: only of such classes does AutoGraph keep the type when it adds the
    place in the user's code.
    """


class JobEndedError(PoseidonError):
    """The job was ended: by a failure of this or another rank, or by a rank that left early."""

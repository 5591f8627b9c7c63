"""`python -m tf_poseidon` is the command `tf-poseidon`."""

from tf_poseidon.commands import cli

cli.main()

"""`python -m tf_poseidon` is the command `tf-poseidon`.

Tests: tests/scripts/test_docs.py.
"""

from tf_poseidon.commands import cli

if __name__ == "__main__":
    cli.main()

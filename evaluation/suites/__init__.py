"""The checks and test suites of others, with and without this package."""

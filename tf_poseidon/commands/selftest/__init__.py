"""`tf-poseidon selftest`: does this job compute what one process does, by every scheme, and how fast are its links?

Small training steps run on all ranks (`scheme_checks.py`), pairs of hosts send each other bytes (`links.py`), and a
report says what was found (`selftest_report.py`).
"""

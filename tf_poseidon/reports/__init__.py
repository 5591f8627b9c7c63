"""Reports as HTML: their page, and the figures on it. `planning/report.py` and `timelines/report.py` fill them."""

"""HTML: a page, and the figures on it. `planning/plan_page.py` and `timelines/timeline_page.py` fill them."""

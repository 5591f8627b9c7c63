"""HTML: a page, and the figures on it. `explanations/plan_page.py` and `timelines/timeline_page.py` fill them."""

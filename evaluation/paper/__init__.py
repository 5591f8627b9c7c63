"""The paper's results beside ours."""

"""Times of single parts, each beside what it is compared with."""

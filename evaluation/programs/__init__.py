"""Programs that others have published, trained plainly and on several ranks."""

"""Steps of which a rank's worker runs ahead of its server."""

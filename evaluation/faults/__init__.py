"""Programs, hosts and links that fail, and how jobs end."""

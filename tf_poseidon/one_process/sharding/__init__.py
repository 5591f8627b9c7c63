"""Variables that ranks divide: into shards of what they update, or into columns of what they compute with."""

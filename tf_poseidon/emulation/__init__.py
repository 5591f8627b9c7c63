"""Hosts that one Linux machine emulates, with links of given rates, for jobs that are to run on several."""

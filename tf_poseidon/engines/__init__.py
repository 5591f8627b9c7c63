"""What moves bytes between the processes of a job."""

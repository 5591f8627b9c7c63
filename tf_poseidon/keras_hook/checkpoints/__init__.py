"""What is saved of a job, and where it resumes."""

"""What users hand over: files and arguments, and what is said of those that mean nothing."""

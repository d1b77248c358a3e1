"""Files and arguments of users, and the errors for meaningless ones."""

"""What a call may be: its inputs, and how they are refused."""

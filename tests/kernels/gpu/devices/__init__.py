"""What runs on devices other than a Hopper."""

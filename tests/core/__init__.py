"""What every package uses."""

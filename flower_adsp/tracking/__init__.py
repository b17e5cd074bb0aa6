"""What follows a run: small callbacks, one a file."""

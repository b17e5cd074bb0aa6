"""A Flower app that brings its own model and data."""

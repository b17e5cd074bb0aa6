"""Training parts of a model: units, memory-true layers, memory model, planner and plans."""
